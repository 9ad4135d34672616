"""Decoder layers fused for a GPU, where the model computes the same with them."""

import logging

from transformers import PreTrainedModel

from tgi_server.engine.attention.base import AttentionBackend
from tgi_server.engine.layers import fuse
from tgi_server.engine.runners.probe import attention_variants, fault_since
from tgi_server.engine.sharding import ShardGroup

logger = logging.getLogger(__name__)


def fuse_layers(model: PreTrainedModel, backend: AttentionBackend, group: ShardGroup | None = None) -> list[str]:
    """Fuses the layers of a model on the paged path that are known. All shards do, or none.

    The backend's blocks are allocated anew. Returns the fall-back if the layers' kernels fail or compute something
    else, which leaves the model as it was.
    """
    fault = fuse(model, attention_variants(model), fault_since(model, backend, "fused layers", group))
    if fault is None:
        return []
    fallback = f"decoder layers are not fused, which is slow: {fault}"
    logger.warning(fallback)
    return [fallback]
