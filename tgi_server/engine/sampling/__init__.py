"""Choosing the next token: processors, warpers, seeded draws, watermark and what is reported of them.

Start reading at `sampler.py`.
"""

from tgi_server.engine.sampling.logprobs import prompt_logprobs
from tgi_server.engine.sampling.row import is_plain
from tgi_server.engine.sampling.sampled import PendingTokens, Sampled, Tokens
from tgi_server.engine.sampling.sampler import Sampler
from tgi_server.engine.sampling.token_mask import TokenMask
from tgi_server.engine.sampling.watermark import WatermarkScore, WatermarkSettings, detect

__all__ = [
    "PendingTokens",
    "Sampled",
    "Sampler",
    "TokenMask",
    "Tokens",
    "WatermarkScore",
    "WatermarkSettings",
    "detect",
    "is_plain",
    "prompt_logprobs",
]
