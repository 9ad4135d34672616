"""The backend of plain torch, for any device, with which the others are compared."""

from functools import partial

import torch
from transformers import PreTrainedModel

from shared.control_groups import usable_cores
from tgi_server.engine.backends.attention.base import AttentionBackend, KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import Backend, MakeLora, PagedModel
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.kv_cache_probe import choose_kv_format
from tgi_server.engine.backends.lora import TorchLora
from tgi_server.engine.backends.probe import LogitsProbe, probe_paged_path
from tgi_server.engine.config import KV_CACHE_DTYPES, EngineConfig
from tgi_server.engine.models.spec import DecoderSpec, Family


class ReferenceBackend(Backend):
    """Runs the forward pass of `transformers`, also for models with a spec."""

    def __init__(self, source: PreTrainedModel, config: EngineConfig) -> None:
        super().__init__(source, config)
        self.fixed_memory = on_gpu = source.device.type == "cuda"
        self.where = "on a GPU in plain torch" if on_gpu else "on a CPU"
        self.cheap_tokens = 128 if on_gpu else 4
        self.spare_cores = usable_cores() - (0 if on_gpu else torch.get_num_threads())

    def create_model(self, family: Family, spec: DecoderSpec | None) -> PagedModel | None:
        found = probe_paged_path(self.source, family, self.group)
        if found is None:
            return None
        model, probe = found
        model.attention = self.attention(probe.shape, self._kv_format())
        proved = self._proved(model, probe, spec)
        proved.kv_shape = probe.shape
        if (kv_format := proved.attention.kv_format).fp8:
            make = partial(self.attention, proved.attention.shape)
            choose_kv_format(proved, kv_format, make, self.config.model_path, model.positions, self.group)
        return proved

    def attention(self, shape: KVShape, kv_format: KVFormat | None = None) -> AttentionBackend:
        return GatherAttention(shape, self.source.device, self.source.dtype, kv_format)

    def lora(self, max_rank: int) -> MakeLora:
        return lambda outputs, parts: TorchLora()

    def _proved(self, model: GenericModel, probe: LogitsProbe, spec: DecoderSpec | None) -> PagedModel:
        """Returns the model as the device computes it best, once that is proved. probe: of the generic model."""
        return model

    def _kv_format(self) -> KVFormat:
        if self.config.kv_cache_dtype is None:
            return KVFormat(self.source.dtype)
        return KVFormat(KV_CACHE_DTYPES[self.config.kv_cache_dtype], getattr(self.source, "kv_scales", {}))
