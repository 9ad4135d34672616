"""The backend of CPUs: the engine's own kernels in C++, or plain torch with oneDNN where they are not compiled."""

import logging

import torch
from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.base import AttentionBackend, KVShape
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import MakeLora, PagedModel
from tgi_server.engine.backends.build import Unfit, build_decoder, has_small_layers, pack_linears, unpack
from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.lora import CpuLora
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.backends.reference import ReferenceBackend
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import linear_factory
from tgi_server.engine.linear.onednn import has_products
from tgi_server.engine.memory import forget_pages, low_mmap_threshold
from tgi_server.engine.models.spec import DecoderSpec

logger = logging.getLogger(__name__)


class CpuBackend(ReferenceBackend):
    """Runs a spec as one kernel call, and other models in the layers of `transformers` with packed linear layers."""

    def __init__(self, source: PreTrainedModel, config: EngineConfig, *, alone: bool = True) -> None:
        """alone: False: this process also runs a larger model, whose number of threads is used."""
        self._in_one_thread = alone and has_small_layers(source)
        self._limit_threads()
        super().__init__(source, config)
        pinned = config.linear_kernels
        self._linear = linear_factory(source, source.dtype, config.quantize, pinned=pinned)
        self.linear_kernels = str(self._linear)
        self.samples_on_cpu = load_kernels()
        if not load_kernels():
            self.fallbacks.append("the CPU kernels are not available; plain torch is used")

    def resume(self, config: EngineConfig) -> None:
        super().resume(config)
        self._limit_threads()

    def _limit_threads(self) -> None:
        if self._in_one_thread and torch.get_num_threads() > 1:
            logger.info("the model is small: it runs in one thread")
            torch.set_num_threads(1)

    def attention(self, shape: KVShape, kv_format: KVFormat | None = None) -> AttentionBackend:
        if CpuAttention.supports(shape, self.source.dtype):
            return CpuAttention(shape, self.source.device, self.source.dtype, kv_format)
        return super().attention(shape, kv_format)

    def lora(self, max_rank: int) -> MakeLora:
        if load_kernels():
            return lambda outputs, parts: CpuLora(outputs)
        return super().lora(max_rank)

    @low_mmap_threshold()
    def pack(self, module: nn.Module) -> None:
        linear = linear_factory(module, self.source.dtype, None, pinned=self.config.linear_kernels)
        pack_linears(module, linear)

    @low_mmap_threshold()
    def pack_source(self) -> None:
        pack_linears(self.source, self._linear)
        if not has_products(self.source.dtype):  # then torch has no fast attention of this dtype either
            self.source.float()

    def unpack_source(self) -> bool:
        unpack(self.source)
        return True

    @low_mmap_threshold()
    def _proved(self, model: GenericModel, probe: LogitsProbe, spec: DecoderSpec | None) -> PagedModel:
        if self.config.kv_cache_dtype is not None:
            probe = LogitsProbe(model, self.group, kv_format=model.attention.kv_format)
        proved = None if spec is None else self._of_spec(model, probe, spec)
        if proved is None:
            pack_linears(self.source, self._linear)
            proved = model
        fault = probe.fault(proved, "the CPU kernels", self._linear.rounding)
        if fault:
            raise UnsupportedModel(f"{self.source.config.model_type}: {fault}; start with --disable-custom-kernels")
        return proved

    def _of_spec(self, model: GenericModel, probe: LogitsProbe, spec: DecoderSpec) -> PagedModel | None:
        """Returns the model in one kernel call; None where there are no kernels for a part of it."""
        attention, group, source = model.attention, self.group, self.source
        family = source.config.model_type
        shape = attention.shape.joined() if spec.has_latents else attention.shape
        if not CpuAttention.supports(shape, source.dtype):
            logger.info("%s runs in the layers of transformers: there is no kernel for its attention", family)
            return None
        if not isinstance(attention, CpuAttention):
            attention = CpuAttention(shape, source.device, source.dtype, attention.kv_format)
        forget_pages([source.get_output_embeddings().weight])  # which the probe has read
        try:
            decoder = build_decoder(source, spec, probe.variants, self._linear, pack_linears)
        except Unfit as reason:
            logger.info("%s runs in the layers of transformers: %s", family, reason)
            return None
        return CpuModel(source, decoder, attention, group)
