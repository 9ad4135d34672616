"""The backend of GPUs: products of cuBLAS, the engine's own kernels in Triton, each proved when a model is loaded."""

import logging
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention import flash
from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention, fault_of_places
from tgi_server.engine.backends.attention.cuda_latents import LatentAttention
from tgi_server.engine.backends.attention.flash import FlashAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import MakeLora, PagedModel
from tgi_server.engine.backends.build import build_decoder
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.pack import pack_quantized
from tgi_server.engine.backends.plain import PlainBackend
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.linear.gpu import Findings, gpu_linear_factory
from tgi_server.engine.linear.grouped_experts import group_experts
from tgi_server.engine.models.spec import DecoderSpec
from tgi_server.engine.parallel import fault_of_any

logger = logging.getLogger(__name__)

# How much all fused layers together may change logits, as a share of their norm. Wrong layers change them far more.
_ROUNDING = 0.1


class CudaBackend(PlainBackend):
    """Uses plain torch for each part whose kernels fail or give other results, and reports it in `fallbacks`."""

    def __init__(self, source: PreTrainedModel, config: EngineConfig) -> None:
        super().__init__(source, config)
        self._found = Findings()
        self._linear, self.fallbacks = gpu_linear_factory(source, source.dtype, config.group, self._found)
        self.fallbacks += group_experts(source, source.dtype, config.group)
        if config.group is not None and config.group.fallback is not None:
            self.fallbacks.append(config.group.fallback)
        self.linear_kernels = str(self._linear)
        self._kind: type[ReferenceModel] = ReferenceModel  # class of models with a spec
        # the fastest first
        self._attention: list[type[GatherAttention]] = [FlashAttention, CudaAttention, LatentAttention]

    def attention(self, shape: KVShape, kv_format: KVFormat | None = None) -> AttentionBackend:
        for kind in self._attention:
            if kind.supports(shape, self.source.dtype):
                return kind(shape, self.source.device, self.source.dtype, kv_format)
        return super().attention(shape, kv_format)

    def lora(self, max_rank: int) -> MakeLora:
        try:
            from tgi_server.engine.backends.triton_lora import TritonLora, fault_of
        except ImportError as error:
            fault: str | None = str(error)
        else:
            fault = fault_of(self.source.dtype, self.source.device)
        if fault is not None:
            logger.warning("adapters are computed in plain torch, which is slow: %s", fault)
            return super().lora(max_rank)
        return lambda outputs, parts: TritonLora(outputs, parts * max_rank, self.source.device)

    def layer_model(
        self,
        source: PreTrainedModel,
        spec: DecoderSpec,
        variants: Mapping[int, AttentionVariant],
        embedding: nn.Module | None,
        head: nn.Module | None,
    ) -> PagedModel:
        linear, _ = gpu_linear_factory(source, source.dtype, self.group, self._found)
        for fallback in group_experts(source, source.dtype, self.group):
            self._found.fall_back(fallback)
        decoder = build_decoder(source, spec, variants, linear, pack_quantized, embedding, head)
        return self._kind(source, decoder, self.attention(decoder.kv_shape))

    def _created(self, spec: DecoderSpec | None, positions: int | None) -> PagedModel | None:
        if spec is not None and (found := self._reference(spec, positions, self._linear, pack_quantized)) is not None:
            reference, _ = found
            return self._fused(reference, self._with_attention(reference))
        found_generic = self._generic(positions)
        if found_generic is None:
            return None
        model, _ = found_generic
        self._with_attention(model)
        pack_quantized(self.source, self._linear)
        return model

    def _with_attention(self, model: GenericModel | ReferenceModel) -> LogitsProbe:
        """Gives the model the fastest attention that is right. Returns logits of long texts."""
        kv_format, shape = self._kv_format(), model.kv_shape
        probe = LogitsProbe(model, self.group, long=True, kv_format=kv_format)
        model.attention = self.attention(shape, kv_format)
        if type(model.attention) is GatherAttention:
            fastest = CudaAttention if shape.value_dim is None else LatentAttention
            self._fall_back(f"attention runs in plain torch, which is slower: {fastest.fault(shape)}")
        while type(model.attention) is not GatherAttention:
            kind, fault = type(model.attention), None
            if any(variant.chunk for variant in model.variants.values()):
                fault = "the attention kernels have no chunks"
            elif isinstance(model.attention, LatentAttention):
                fault = model.attention.fault_of(model.variants.values())
            elif isinstance(model.attention, FlashAttention):
                windows = {variant.window for variant in model.variants.values()}
                fault = fault_of_any(flash.fault_of(model.attention, windows), self.group)
            fault = fault or fault_of_any(fault_of_places(model.attention), self.group)
            fault = fault or probe.fault(model, kind.__name__)
            if fault is None:
                break
            self._attention = [each for each in self._attention if each is not kind]
            model.attention = self.attention(shape, kv_format)
            where = "plain torch" if type(model.attention) is GatherAttention else "the engine's own kernel"
            self._fall_back(f"attention runs in {where}, which is slower: {fault}")
        return probe

    def _fused(self, reference: ReferenceModel, probe: LogitsProbe) -> PagedModel:
        """Returns the model in fused layers; the reference, with a fallback, if these are wrong or lack Triton."""
        try:
            from tgi_server.engine.backends.cuda_model import CudaModel
        except ImportError as error:
            fault: str | None = str(error)
        else:
            fused = CudaModel(self.source, reference.decoder, reference.attention)
            fused.kv_shape, fused.positions = reference.kv_shape, reference.positions
            fault = probe.fault(fused, "fused layers", max(self._linear.rounding, _ROUNDING))
            if fault is None:
                self._kind = CudaModel
                for fallback in fused.fallbacks:
                    self._fall_back(fallback)
                return fused
        self._fall_back(f"decoder layers are not fused, which is slow: {fault}")
        return reference

    def _fall_back(self, fallback: str) -> None:
        logger.warning(fallback)
        self.fallbacks.append(fallback)
