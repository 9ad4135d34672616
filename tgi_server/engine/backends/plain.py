"""The backend of plain torch, for any device, and the base of the backends for CPUs and GPUs."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from shared.control_groups import usable_cores
from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import Backend, MakeLora, PagedModel
from tgi_server.engine.backends.build import build_decoder
from tgi_server.engine.backends.decoder import Unfit
from tgi_server.engine.backends.generic import GenericModel
from tgi_server.engine.backends.kv_cache_probe import choose_kv_format
from tgi_server.engine.backends.lora import TorchLora
from tgi_server.engine.backends.own_pass import own_pass, window_objection
from tgi_server.engine.backends.paged_path import probe_paged_path
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.config import KV_CACHE_DTYPES, EngineConfig
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.linear import LinearFactory
from tgi_server.engine.linear.modules import ModulesFactory
from tgi_server.engine.memory import HOST, forget_pages
from tgi_server.engine.models.spec import DecoderSpec, Family

logger = logging.getLogger(__name__)


class PlainBackend(Backend):
    """Runs the forward pass of `transformers`, or a spec if the attention of that pass cannot be replaced."""

    def __init__(self, source: PreTrainedModel, config: EngineConfig) -> None:
        super().__init__(source, config)
        self.fixed_memory = on_gpu = source.device.type == "cuda"
        self.where = "on a GPU in plain torch" if on_gpu else "on a CPU"
        self.cheap_tokens = 128 if on_gpu else 4
        self.spare_cores = usable_cores() - (0 if on_gpu else torch.get_num_threads())

    def create_model(self, family: Family, spec: DecoderSpec | None) -> PagedModel | None:
        positions = family.positions(self.source.config.get_text_config(decoder=True))
        model = self._created(spec, positions)
        if model is not None and (kv_format := model.attention.kv_format).fp8:
            make = partial(self.attention, model.attention.shape)
            choose_kv_format(model, kv_format, make, self.config.model_path, positions, self.group)
        return model

    def attention(self, shape: KVShape, kv_format: KVFormat | None = None) -> AttentionBackend:
        return GatherAttention(shape, self.source.device, self.source.dtype, kv_format)

    def lora(self, max_rank: int) -> MakeLora:
        return lambda outputs, parts: TorchLora()

    def layer_model(
        self,
        source: PreTrainedModel,
        spec: DecoderSpec,
        variants: Mapping[int, AttentionVariant],
        embedding: nn.Module | None,
        head: nn.Module | None,
    ) -> PagedModel:
        decoder = build_decoder(source, spec, variants, ModulesFactory(), lambda *_: None, embedding, head)
        return ReferenceModel(source, decoder, self.attention(decoder.kv_shape))

    def _created(self, spec: DecoderSpec | None, positions: int | None) -> PagedModel | None:
        """Returns the fastest correct model for the device. positions: length of the longest text; None: unlimited."""
        otherwise = "takes the padded path" if spec is None else "runs by its spec in plain torch"
        found: tuple[GenericModel | ReferenceModel, LogitsProbe] | None = self._generic(positions, otherwise)
        if found is None and spec is not None:
            found = self._reference(spec, positions, ModulesFactory(), lambda *_: None)
        if found is None:
            return None
        model, _ = found
        model.attention = self.attention(model.kv_shape, self._kv_format())
        return model

    def _generic(
        self, positions: int | None, otherwise: str = "takes the padded path"
    ) -> tuple[GenericModel, LogitsProbe] | None:
        """Returns the forward pass of `transformers` on the paged KV cache, and its logits; None if it is wrong.

        otherwise: how the model is computed in that case, for the log.
        """
        found = probe_paged_path(self.source, self.group)
        if isinstance(found, str):
            logger.info("%s %s: %s", self.source.config.model_type, otherwise, found)
            return None
        found[0].positions = positions
        return found

    def _reference(
        self,
        spec: DecoderSpec,
        positions: int | None,
        linear: LinearFactory,
        pack: Callable[[nn.Module, LinearFactory], None],
    ) -> tuple[ReferenceModel, LogitsProbe] | None:
        """Returns a model by its spec in plain torch, and its logits with its own attention; None if it has
        no such model.

        linear: makes linear layers. pack: packs those of a mixture. Raises UnsupportedModel for a spec that is wrong.
        """
        source, name = self.source, self.source.config.model_type
        own = own_pass(source)
        if source.device == HOST:
            forget_pages(source.get_output_embeddings().parameters(recurse=False))  # which the pass has read
        try:
            decoder = build_decoder(source, spec, own.variants, linear, pack)
        except Unfit as reason:
            logger.info("%s runs in the layers of transformers: %s", name, reason)
            return None
        model = ReferenceModel(source, decoder, GatherAttention(decoder.kv_shape, source.device, source.dtype))
        model.positions = positions
        probe = LogitsProbe(model, self.group, expected=own.logits)
        fault = window_objection(source, model.variants, spec) or probe.fault(model, "its spec", linear.rounding)
        if fault is not None:
            raise UnsupportedModel(f"{name}: {fault}; start with --disable-custom-kernels")
        return model, probe

    def _kv_format(self) -> KVFormat:
        if self.config.kv_cache_dtype is None:
            return KVFormat(self.source.dtype)
        return KVFormat(KV_CACHE_DTYPES[self.config.kv_cache_dtype], getattr(self.source, "kv_scales", {}))
