"""Several tokens a step: tokens are drafted, and those that would have been chosen anyway are accepted."""

from tgi_server.engine.speculation.draft import Draft, DraftCheck
from tgi_server.engine.speculation.drafters import HistoryDrafter, NgramDrafter
from tgi_server.engine.speculation.loading import load_drafter, load_own_drafter
from tgi_server.engine.speculation.speculation import Speculation

__all__ = [
    "Draft",
    "DraftCheck",
    "HistoryDrafter",
    "NgramDrafter",
    "Speculation",
    "load_drafter",
    "load_own_drafter",
]
