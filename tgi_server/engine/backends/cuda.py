"""The backend of GPUs: products of cuBLAS, the engine's own kernels in Triton, each proved when a model is loaded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from tgi_server.engine.backends.attention import flash
from tgi_server.engine.backends.attention.base import AttentionBackend, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention
from tgi_server.engine.backends.attention.cuda_latents import LatentAttention
from tgi_server.engine.backends.attention.flash import FlashAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import MakeLora, PagedModel
from tgi_server.engine.backends.build import Unfit, build_decoder, decoder_of, layers_of, pack_quantized
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.backends.reference import ReferenceBackend
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.linear.gpu import gpu_linear_factory
from tgi_server.engine.linear.grouped_experts import group_experts
from tgi_server.engine.models.spec import DecoderSpec
from tgi_server.engine.parallel import fault_of_any

logger = logging.getLogger(__name__)

# The share of their norm by which all fused layers together may change logits, once the first has been proved: a layer
# of another kind that is wrong changes them by far more.
_ROUNDING = 0.1


class CudaBackend(ReferenceBackend):
    """Uses plain torch for each part whose kernels fail or give other results, and reports it in `fallbacks`."""

    def __init__(self, source: PreTrainedModel, config: EngineConfig) -> None:
        super().__init__(source, config)
        self._linear, self.fallbacks = gpu_linear_factory(source, source.dtype, config.group)
        self.fallbacks += group_experts(source, source.dtype, config.group)
        if config.group is not None and config.group.fallback is not None:
            self.fallbacks.append(config.group.fallback)
        self.linear_kernels = str(self._linear)
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

    def _proved(self, model: GenericModel, probe: LogitsProbe, spec: DecoderSpec | None) -> PagedModel:
        proved = None
        if type(model.attention) is GatherAttention:
            kind = CudaAttention if probe.shape.value_dim is None else LatentAttention
            self._fall_back(f"attention runs in plain torch, which is slower: {kind.fault(probe.shape)}")
        else:
            probe = LogitsProbe(model, self.group, long=True, kv_format=model.attention.kv_format)
            self._prove_attention(model, probe)
            fused = type(model.attention) is not GatherAttention
            if fused and spec is not None and not spec.on_cpus_alone:
                proved = self._of_spec(model, probe, spec)
        if proved is None:
            pack_quantized(self.source, self._linear)
        return proved or model

    def _prove_attention(self, model: GenericModel, probe: LogitsProbe) -> None:
        """Gives the model the fastest attention that computes what plain torch does."""
        while type(model.attention) is not GatherAttention:
            kind, fault = type(model.attention), None
            if any(variant.chunk for variant in probe.variants.values()):
                fault = "the attention kernels have no chunks"
            elif isinstance(model.attention, LatentAttention):
                fault = model.attention.fault_of(probe.variants.values())
            elif isinstance(model.attention, FlashAttention):
                windows = {variant.window for variant in probe.variants.values()}
                fault = fault_of_any(flash.fault_of(model.attention, windows), self.group)
            fault = fault or probe.fault(model, kind.__name__)
            if fault is None:
                return
            self._attention = [each for each in self._attention if each is not kind]
            model.attention = self.attention(probe.shape, model.attention.kv_format)
            where = "plain torch" if type(model.attention) is GatherAttention else "the engine's own kernel"
            self._fall_back(f"attention runs in {where}, which is slower: {fault}")

    def _of_spec(self, model: GenericModel, probe: LogitsProbe, spec: DecoderSpec) -> PagedModel | None:
        """Returns the model in fused layers; None if its first layer has other outputs in them."""
        from tgi_server.engine.backends.cuda_model import CudaModel

        source, linear = self.source, self._linear
        of_first = replace(spec, layers=spec.layers[:1])
        try:
            with _first_layer(source, spec):
                first = LogitsProbe(model, self.group, long=True, kv_format=model.attention.kv_format)
                decoder = build_decoder(source, of_first, probe.variants, linear, pack_quantized, keep=True)
                trial = CudaModel(source, decoder, model.attention)
                fault = first.fault(trial, "fused layers", linear.rounding)
                del decoder, trial
            if fault is None:
                decoder = build_decoder(source, spec, probe.variants, linear, pack_quantized)
        except Unfit as reason:
            fault = str(reason)
        if fault is not None:
            self._fall_back(f"decoder layers are not fused, which is slow: {fault}")
            return None
        whole = CudaModel(source, decoder, model.attention)
        if fault := probe.fault(whole, "fused layers", max(linear.rounding, _ROUNDING)):
            raise UnsupportedModel(f"{source.config.model_type}: {fault}; start with --disable-custom-kernels")
        return whole

    def _fall_back(self, fallback: str) -> None:
        logger.warning(fallback)
        self.fallbacks.append(fallback)


@contextmanager
def _first_layer(model: Any, spec: DecoderSpec) -> Iterator[None]:
    """Makes a model of `transformers` compute only its first layer."""
    layers = layers_of(model, spec)
    if not layers:
        raise Unfit("it has no list of layers")
    setattr(decoder_of(model), spec.layer_list, layers[:1])
    try:
        yield
    finally:
        setattr(decoder_of(model), spec.layer_list, layers)
