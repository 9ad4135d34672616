"""The backend of CPUs: the engine's own kernels in C++, or plain torch with oneDNN where they are not compiled."""

import logging
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, KVShape
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import MakeLora, PagedModel
from tgi_server.engine.backends.build import build_decoder
from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.backends.lora import CpuLora
from tgi_server.engine.backends.pack import has_small_layers, pack_linears, unpack
from tgi_server.engine.backends.plain import PlainBackend
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import linear_factory
from tgi_server.engine.linear.onednn import has_products
from tgi_server.engine.memory import low_mmap_threshold
from tgi_server.engine.models.spec import DecoderSpec

logger = logging.getLogger(__name__)


class CpuBackend(PlainBackend):
    """Runs a spec as one kernel call, and other models as `transformers` does, with packed linear layers."""

    def __init__(self, source: PreTrainedModel, config: EngineConfig, *, alone: bool = True) -> None:
        """alone: False if this process also runs a larger model, whose number of threads is used."""
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
    def layer_model(
        self,
        source: PreTrainedModel,
        spec: DecoderSpec,
        variants: Mapping[int, AttentionVariant],
        embedding: nn.Module | None,
        head: nn.Module | None,
    ) -> PagedModel:
        linear = linear_factory(source, self.source.dtype, None, pinned=self.config.linear_kernels)
        decoder = build_decoder(source, spec, variants, linear, pack_linears, embedding, head)
        return self._in_kernels(ReferenceModel(source, decoder, self.attention(decoder.kv_shape)))

    @low_mmap_threshold()
    def _created(self, spec: DecoderSpec | None, positions: int | None) -> PagedModel | None:
        model = None if spec is None else self._of_spec(spec, positions)
        return self._packed(positions) if model is None else model

    def _of_spec(self, spec: DecoderSpec, positions: int | None) -> PagedModel | None:
        """Returns the model in one kernel call, or by its spec in plain torch; None where that is not possible."""
        found = self._reference(spec, positions, self._linear, pack_linears)
        if found is None:
            return None
        reference, probe = found
        kv_format = self._kv_format()
        model = self._in_kernels(reference, kv_format)
        if model is reference:
            return reference
        if kv_format.fp8:
            probe = LogitsProbe(reference, self.group, kv_format=kv_format)
        return self._right(model, probe)

    def _in_kernels(self, reference: ReferenceModel, kv_format: KVFormat | None = None) -> PagedModel:
        """Returns the model in one kernel call. If that is not possible, logs the reason and returns the reference."""
        source, shape = reference.source, reference.kv_shape
        joined = shape.joined() if reference.decoder.spec.has_latents else shape
        try:
            if not CpuAttention.supports(joined, self.source.dtype):
                raise UnsupportedModel("there is no kernel for its attention")
            attention = CpuAttention(joined, self.source.device, self.source.dtype, kv_format)
            model = CpuModel(source, reference.decoder, attention, self.group)
        except UnsupportedModel as reason:
            logger.info("%s runs in plain torch: %s", self.source.config.model_type, reason)
            reference.attention = self.attention(shape, kv_format)
            return reference
        model.kv_shape = shape
        return model

    def _packed(self, positions: int | None) -> PagedModel | None:
        """Returns the forward pass of `transformers` with packed linear layers."""
        found = self._generic(positions)
        if found is None:
            return None
        model, probe = found
        kv_format = self._kv_format()
        if kv_format.fp8:
            probe = LogitsProbe(model, self.group, kv_format=kv_format)
        model.attention = self.attention(model.kv_shape, kv_format)
        pack_linears(self.source, self._linear)
        return self._right(model, probe)

    def _right(self, model: PagedModel, probe: LogitsProbe) -> PagedModel:
        """Returns the model. Raises UnsupportedModel if its logits are not those of the probe."""
        fault = probe.fault(model, "the CPU kernels", self._linear.rounding)
        if fault:
            raise UnsupportedModel(f"{self.source.config.model_type}: {fault}; start with --disable-custom-kernels")
        return model
