"""Models without an engine: on the paged path, and by their specs in plain torch."""

from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.build import build_decoder
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.own_pass import own_pass
from tgi_server.engine.backends.paged_path import probe_paged_path
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.linear.modules import ModulesFactory
from tgi_server.engine.models.families import spec_of


def probed(model: PreTrainedModel) -> tuple[GenericModel, LogitsProbe]:
    """Returns the model with paged attention, and what it computes."""
    found = probe_paged_path(model)
    assert not isinstance(found, str), found
    return found


def by_spec(model: PreTrainedModel) -> ReferenceModel:
    """Returns a model by its spec, in plain torch."""
    variants = own_pass(model).variants
    decoder = build_decoder(model, spec_of(model.config), variants, ModulesFactory(), lambda *_: None)
    return ReferenceModel(model, decoder, GatherAttention(decoder.kv_shape, model.device, model.dtype))
