"""Compares, at load, what a model computes in different ways.

With its own attention, a model runs a short text, and says how its layers attend. By the logits of that text every
other way is judged, which computes two packed prompts and a decode step: a spec in plain torch, which then judges
models with kernels; or, for a model without a spec, `transformers`' own forward pass on the paged cache, with every key
and value caught on the way. A model that silently ignores a registered attention function shows no calls; one whose
attention does more than the paged path supports, or reads other sequences, has other logits.

If a model is split, all shards do this together, each with its slices. This cannot show if the slices are the right
ones: the plan of the architecture decides that.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import (
    AttentionVariant,
    ChunkSpan,
    ForwardMetadata,
    KVShape,
)
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat, storage
from tgi_server.engine.backends.attention.paged_cache import attention_variant
from tgi_server.engine.backends.base import PagedModel, PassInput
from tgi_server.engine.backends.generic import GenericModel, install_paged_attention
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.errors import EngineError, PeerLost
from tgi_server.engine.models.spec import DecoderSpec, Family
from tgi_server.engine.parallel import ShardGroup, fault_of_any
from tgi_server.engine.parallel.layers import ShardedLayer
from tgi_server.engine.parallel.shares import Share

logger = logging.getLogger(__name__)

# Tokens of the two prompts; both are the start of the same text.
LONG, SHORT = 8, 5
# Tokens of the text on which a backend is proved: several blocks, and several parts for whoever cuts keys into parts.
_LONG_RUN = 300
# Where rounding alone changes the logits by more than their tolerance, that is the tolerance, up to this.
_MOST_NOISE = 0.3
# Arguments of attention modules that have a bias for each head.
_BIASES = ("alibi", "position_bias")
# Layers of `transformers`' cache, by what they have. Older versions lack some of them.
_WITHOUT_KEYS = {"LinearAttentionLayer", "DummyLayer"}
_OF_ALL_TOKENS = {"DynamicLayer", "DynamicIndexedLayer", "LinearAttentionAndFullAttentionLayer"}
_WITH_WINDOW = {"DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}


class _Recorder(GatherAttention):
    """Makes room for a layer when its first keys come, and remembers their shapes and how each layer attends."""

    def __init__(self, model: PreTrainedModel, tokens: int = 1, kv_format: KVFormat | None = None) -> None:
        """tokens: of the longer of two texts. kv_format: None: keys and values are cached as they come."""
        super().__init__(KVShape(heads=(), head_dim=0), model.device, model.dtype, kv_format)
        self._blocks = 2 * blocks_of(tokens, self.block_size) + 1
        self._keys: dict[int, Tensor] = {}  # type: ignore[assignment]
        self._values: dict[int, Tensor] = {}  # type: ignore[assignment]
        self.variants: dict[int, AttentionVariant] = {}
        self.written = 0
        self.attended = 0

    def write(self, layer: int, key: Tensor, value: Tensor, metadata: ForwardMetadata) -> None:
        if layer not in self._keys:
            keys, values = storage(self.kv_format.keys), storage(self.kv_format.dtype)
            self._keys[layer] = key.new_zeros(self._blocks, self.block_size, *key.shape[1:], dtype=keys)
            self._values[layer] = value.new_zeros(self._blocks, self.block_size, *value.shape[1:], dtype=values)
        self.written += 1
        super().write(layer, key, value, metadata)

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        self.attended += 1
        self.variants[layer] = variant
        return super().attend(layer, query, metadata, variant)

    @property
    def cached_layers(self) -> int:
        """The number of layers that have keys of their own."""
        return len(self._keys)

    @property
    def unequal(self) -> bool:
        """True if a layer's keys have another shape than its values, though they are not latents."""
        return any(
            keys.shape != self._values[layer].shape
            for layer, keys in self._keys.items()
            if self.variants[layer].latents is None
        )

    @property
    def kv_shape(self) -> KVShape:
        """The shape of the keys that have come, for all layers up to the last one that attends."""
        layers = 1 + max(self.variants)
        heads, sizes = [0] * layers, [0] * layers
        for layer, keys in self._keys.items():
            heads[layer], sizes[layer] = keys.shape[2:]
        alike = len({size for size in sizes if size}) == 1
        latents = any(variant.latents for variant in self.variants.values())
        value_dim = max(values.shape[3] for values in self._values.values()) if latents else None
        return KVShape(tuple(heads), max(sizes), None if alike else tuple(sizes), value_dim)


@dataclass(frozen=True, slots=True, eq=False)
class OwnPass:
    """The logits of a model with its own attention, of the texts of `_run`: [4, vocab_size]; and how layers attend.

    variants: of the layers that call attention through `AttentionInterface`.
    """

    logits: Tensor
    variants: Mapping[int, AttentionVariant]


def own_pass(model: PreTrainedModel) -> OwnPass:
    """Computes a text with the model's own attention, and notes how it is called."""
    _choose_attention(model)
    with _calls_noted(model) as variants:
        return OwnPass(_own_logits(model), variants)


def _own_logits(model: PreTrainedModel) -> Tensor:
    """Returns the logits of OwnPass. A prompt's logits are those of any text that it starts."""
    tokens = probe_tokens(model, LONG + 1)
    with _own_biases(model):
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits
    return logits[0, [LONG - 1, SHORT - 1, LONG, SHORT]]


def _choose_attention(model: PreTrainedModel) -> None:
    """Chooses an attention of `transformers` that does what the configuration says."""
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the default of transformers 5.17 leaves the cap out


@contextmanager
def _calls_noted(model: PreTrainedModel) -> Iterator[dict[int, AttentionVariant]]:
    """Notes what attention modules say when they call the attention function, by their layer."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    own, known = ALL_ATTENTION_FUNCTIONS.get(name), dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    variants: dict[int, AttentionVariant] = {}
    keys: list[tuple[int, Tensor]] = []

    def noted(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        source = next((index for index, earlier in keys if earlier is key), layer)
        keys.append((layer, key))
        variants[layer] = attention_variant(query, kwargs, None if source == layer else source)
        function = own or sys.modules[type(module).__module__].eager_attention_forward
        return function(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = noted
    try:
        yield variants
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping = known


@contextmanager
def _own_biases(model: nn.Module) -> Iterator[None]:
    """Gives the attention modules of a shard the biases of their own heads (alibi), not those of all heads."""

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        share: Any = module.share
        heads = slice(share.queries.start, share.queries.stop)
        return args, kwargs | {name: bias[heads] for name in _BIASES if (bias := kwargs.get(name)) is not None}

    modules = [each for each in model.modules() if isinstance(getattr(each, "share", None), Share)]
    hooks = [
        each.register_forward_pre_hook(cut, with_kwargs=True) for each in modules if not isinstance(each, ShardedLayer)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def window_objection(
    model: PreTrainedModel, variants: Mapping[int, AttentionVariant], spec: DecoderSpec | None = None
) -> str | None:
    """Returns why layers do not attend as the configuration says, in words; None if they do.

    spec: of the model; a window that a layer has from it is right, since the layer tells it nobody.
    """
    untold = set() if spec is None else {layer for layer, of_layer in enumerate(spec.layers) if of_layer.window}
    said = {layer: (0 if layer in untold else each.window, each.chunk) for layer, each in variants.items()}
    return None if said == _windows(model) else "its layers look at other tokens than they tell the attention function"


def probe_paged_path(
    model: PreTrainedModel, family: Family, group: ShardGroup | None = None
) -> "tuple[GenericModel, LogitsProbe] | None":
    """Returns the model on the paged path, and what it computes there; None when it has to take the padded path.

    family: of the model. group: the shards of the model, when this is one of them. Leaves the model with paged
    attention when it can take the paged path, else with its own.
    """
    if model.config.is_encoder_decoder:
        return None
    _choose_attention(model)
    expected = _own_logits(model)
    recorder = _Recorder(model)
    restore = install_paged_attention(model, family.attention)
    try:
        paged = GenericModel(model, recorder)
        actual = _run(paged)
    except PeerLost:
        raise
    except (EngineError, TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
        reason: str | None = f"its attention cannot be replaced ({type(error).__name__}: {error})"
    else:
        reason = _objection(model, recorder, expected, actual)
    reason = fault_of_any(reason, group)
    if reason is None:
        paged.variants = recorder.variants
        paged.kv_shape = recorder.kv_shape
        paged.attention = GatherAttention(paged.kv_shape, model.device, model.dtype)
        reason = LogitsProbe(paged, group, expected=expected).fault(paged, "paged attention")
    if reason is None:
        return paged, LogitsProbe(paged, group, expected=actual)
    logger.info("%s takes the padded path: %s", model.config.model_type, reason)
    restore()
    return None


class LogitsProbe:
    """The logits of some texts, by which models are judged.

    All shards of a model make one, and call it in the same order.
    """

    def __init__(
        self,
        model: GenericModel | ReferenceModel,
        group: ShardGroup | None = None,
        *,
        long: bool = False,
        kv_format: KVFormat | None = None,
        expected: Tensor | None = None,
    ) -> None:
        """model: computes the logits with attention in plain torch. group: the shards of the model, when this is one of
        them. long: of texts of several blocks. kv_format: how keys and values are cached; None: as they come. expected:
        the logits, of short texts, where they are known.
        """
        self._model = model
        self._group = group
        self._length = min(_LONG_RUN, model.positions or _LONG_RUN) if long else None
        self._kv_format = kv_format or KVFormat(model.attention.dtype)
        logits = self._in_plain_torch() if expected is None else expected
        self._expected = logits.to(model.attention.dtype)  # some models return logits in float32
        self._allowance = proofs.FP8_KEYS if self._kv_format.fp8 else 0.0
        self._noise: float | None = None

    def fault(self, model: PagedModel, name: str, rounding: float = 0.0) -> str | None:
        """Returns why a model must not compute as it does now, in words; None: it may.

        Its KV blocks are allocated anew. name: of what is done differently. rounding: share of their norm by which the
        logits may change besides. All shards come to the same answer.
        """
        fault = self._fault(model, name, self._allowance + rounding)
        if fault is None or self._expected.dtype is torch.float32:
            return fault
        if self._noise is None:
            self._noise = self._rounding_noise() - proofs.TOLERANCES["logits"][self._expected.dtype]
        return self._fault(model, name, max(self._allowance, self._noise) + rounding)

    def _fault(self, model: PagedModel, name: str, allowance: float) -> str | None:
        def cases() -> Iterator[proofs.Case]:
            yield "in its logits", self._logits(model), self._expected

        fault = proofs.fault_of(f"the model with {name}", cases, "logits", allowance, proofs.logits_error)
        return fault_of_any(fault, self._group)

    def _logits(self, model: PagedModel) -> Tensor:
        model.allocate(2 * blocks_of(self._length or 1, model.attention.block_size) + 1)
        return _run(model) if self._length is None else _run_long(model, self._length)

    def _in_plain_torch(self) -> Tensor:
        model, before = self._model, self._model.attention
        model.attention = GatherAttention(before.shape, before.device, before.dtype, self._kv_format)
        try:
            return self._logits(model)
        finally:
            model.attention = before

    def _rounding_noise(self) -> float:
        """Returns the difference of logits that rounding alone can make, up to _MOST_NOISE.

        Rounding adds up over the layers, and in a mixture of experts whose router is undecided the last bit of a number
        may choose other experts. So the logits are computed again with each layer's output a last bit off.
        """
        step = torch.finfo(self._expected.dtype).eps

        def round_otherwise(_: Any, __: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            signs = torch.ones_like(output)
            signs[..., ::2] = -1
            return output * (1 + step * signs)

        plain = self._in_plain_torch()
        hooks = [module.register_forward_hook(round_otherwise) for module in self._model.rounding_modules()]
        try:
            return min(proofs.logits_error(self._in_plain_torch(), plain), _MOST_NOISE)
        finally:
            for hook in hooks:
                hook.remove()


def probe_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Returns some tokens of the model's vocabulary: [count] int64."""
    return torch.arange(count, device=model.device) % model.config.get_text_config(decoder=True).vocab_size


def text_logits(model: PagedModel, tokens: Tensor, wanted: Tensor | None) -> Tensor:
    """Returns the logits of the wanted tokens of a text, or of all, in one pass: [wanted, vocab_size].

    tokens, wanted: [...] int64.
    """
    _allocate_states(model)
    count, size, device = len(tokens), model.attention.block_size, tokens.device
    places = torch.arange(count, device=device)
    metadata = ForwardMetadata(
        slots=size + places,
        block_tables=torch.arange(1, blocks_of(count, size) + 1, dtype=torch.int32, device=device)[None],
        kv_lengths=torch.tensor([count], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        decoding=0,
        chunks=[ChunkSpan(0, count, count)],
        max_kv_length=count,
        state_slots=[1],
    )
    return model.forward(PassInput(tokens, places, metadata, wanted))


def _run(model: PagedModel) -> Tensor:
    """Returns the last logits of both prompts, then those of one more token of each: [4, vocab_size]."""
    _allocate_states(model)
    tables = torch.tensor([[1], [2]], device=model.attention.device)
    passes = [([(0, 0, LONG), (1, 0, SHORT)], 0), ([(0, LONG, 1), (1, SHORT, 1)], 2)]
    return torch.cat([_pass(model, tables, *each) for each in passes])


def _run_long(model: PagedModel, length: int) -> Tensor:
    """Returns the last logits of every part of a run in which a prompt of several blocks is computed in two chunks.

    length: of its longest text. The second chunk is computed while a shorter text decodes. The longer text is then
    attended in several parts where a backend has such.
    """
    _allocate_states(model)
    half, shorter = length // 2, max(1, length // 3)
    count = blocks_of(length, model.attention.block_size)
    tables = torch.arange(2 * count, device=model.attention.device).flip(0).view(2, count) + 1
    passes = [
        ([(0, 0, half), (1, 0, shorter)], 0),
        ([(1, shorter, 1), (0, half, length - 1 - half)], 1),
        ([(0, length - 1, 1), (1, shorter + 1, 1)], 2),
    ]
    return torch.cat([_pass(model, tables, *each) for each in passes])


def _allocate_states(model: PagedModel) -> None:
    """Gives the two texts of a run slots 1 and 2, without anything in them."""
    if model.states is not None:
        model.states.allocate(3)


def blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _pass(model: PagedModel, tables: Tensor, spans: list[tuple[int, int, int]], decoding: int) -> Tensor:
    """Computes parts of two texts. Returns the logits of the last token of each: [spans, vocab_size].

    spans: (row of the tables, first position, tokens) of each part. decoding: how many of them decode; the others are
    chunks of prompts.
    """
    device, size = model.attention.device, model.attention.block_size
    places = [torch.arange(start, start + count, device=device) for _, start, count in spans]
    first = [0, *accumulate(count for *_, count in spans)]
    ends = torch.tensor(first, device=device)
    lengths = [start + count for _, start, count in spans]
    slots = [row + 1 for row, *_ in spans]
    metadata = ForwardMetadata(
        slots=torch.cat(
            [tables[row, place // size] * size + place % size for (row, *_), place in zip(spans, places, strict=True)]
        ),
        block_tables=tables[[row for row, *_ in spans]].to(torch.int32),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_starts=ends.to(torch.int32),
        decoding=decoding,
        chunks=[
            ChunkSpan(begin, count, length) for begin, (*_, count), length in zip(first, spans, lengths, strict=False)
        ][decoding:],
        max_kv_length=max(lengths),
        state_slots=slots,
        row_slots=torch.tensor(slots[:decoding], device=device),
    )
    positions = torch.cat(places)
    tokens = probe_tokens(model.source, max(lengths))[positions]
    return model.forward(PassInput(tokens, positions, metadata, ends[1:] - 1))


def _objection(model: PreTrainedModel, recorder: _Recorder, expected: Tensor, actual: Tensor) -> str | None:
    """Returns why the paged path is wrong for the model; None when it is right."""
    windows, cached = _windows(model), recorder.cached_layers
    attended, written = recorder.attended, recorder.written
    if not windows or attended != 2 * len(windows) or written != 2 * cached:
        return f"it called the attention function {attended} times in {len(windows)} layers, {cached} with keys"
    if recorder.variants.keys() != windows.keys() or recorder.unequal:
        return "its layers have keys of different kinds"
    if objection := window_objection(model, recorder.variants):
        return objection
    if expected.shape != actual.shape:
        return "it does not compute the logits of chosen tokens only"
    return None


def _windows(model: PreTrainedModel) -> dict[int, tuple[int, int] | None]:
    """Returns the window and the chunk of each layer with keys by the model's configuration; None: another kind.

    A probe is too short to show them, so what a layer says of itself is compared with this.
    """
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    chunked = {index for index, each in enumerate(types) if each == "chunked_attention"}
    layers: dict[int, Any] = dict(enumerate(DynamicCache(config=model.config).layers))
    for index, source in _shared(model).items():
        layers[index] = layers[source]
    return {
        index: _window(layer, chunked=index in chunked)
        for index, layer in layers.items()
        if type(layer).__name__ not in _WITHOUT_KEYS
    }


def _window(layer: Any, *, chunked: bool) -> tuple[int, int] | None:
    if type(layer).__name__ in _WITH_WINDOW:
        size = int(layer.sliding_window)
        return (0, size) if chunked else (size, 0)
    return (0, 0) if type(layer).__name__ in _OF_ALL_TOKENS else None


def _shared(model: PreTrainedModel) -> dict[int, int]:
    """Returns the layers without keys of their own by the configuration, each with one that attends as it does."""
    config = model.config.get_text_config(decoder=True)
    modes = getattr(config, "kv_sharing_modes", ())
    return {
        index: config.layer_types.index(config.layer_types[index])
        for index, mode in enumerate(modes)
        if mode == "reuse"
    }
