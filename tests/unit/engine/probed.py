"""Models of `transformers` on the paged path, without an engine."""

from transformers import PreTrainedModel

from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.probe import LogitsProbe, probe_paged_path
from tgi_server.engine.models.families import family_of


def probed(model: PreTrainedModel) -> tuple[GenericModel, LogitsProbe]:
    """Returns the model with paged attention, and what it computes."""
    found = probe_paged_path(model, family_of(model.config))
    assert found is not None
    return found
