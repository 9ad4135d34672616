"""Finds out, at load, if `transformers`' own forward pass is right on the paged KV cache.

A recording attention function gets every key and value. A model that silently ignores it makes no calls; one whose
attention does more than the paged path supports, or reads other sequences, has other logits.
"""

from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.base import AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.generic import GenericModel, install_paged_attention
from tgi_server.engine.backends.own_pass import choose_attention, own_logits, window_objection, windows_of
from tgi_server.engine.backends.probe import LogitsProbe, short_logits
from tgi_server.engine.errors import EngineError, PeerLost
from tgi_server.engine.parallel import ShardGroup, fault_of_any

# Block 0, and one for each of the two texts.
_BLOCKS = 3


class _Recorder(GatherAttention):
    """Allocates the cache of a layer at its first keys, and records their shapes and the layers' attention variants."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(KVShape(heads=(), head_dim=0), model.device, model.dtype)
        self._keys: dict[int, Tensor] = {}  # type: ignore[assignment]
        self._values: dict[int, Tensor] = {}  # type: ignore[assignment]
        self.variants: dict[int, AttentionVariant] = {}
        self.written = 0
        self.attended = 0

    def write(self, layer: int, key: Tensor, value: Tensor, metadata: ForwardMetadata) -> None:
        if layer not in self._keys:
            self._keys[layer] = key.new_zeros(_BLOCKS, self.block_size, *key.shape[1:])
            self._values[layer] = value.new_zeros(_BLOCKS, self.block_size, *value.shape[1:])
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
        """True if a layer's keys have another shape than its values."""
        return any(keys.shape != self._values[layer].shape for layer, keys in self._keys.items())

    @property
    def kv_shape(self) -> KVShape:
        """The shape of the recorded keys, for all layers up to the last one that attends."""
        layers = 1 + max(self.variants)
        heads, sizes = [0] * layers, [0] * layers
        for layer, keys in self._keys.items():
            heads[layer], sizes[layer] = keys.shape[2:]
        alike = len({size for size in sizes if size}) == 1
        return KVShape(tuple(heads), max(sizes), None if alike else tuple(sizes))


def probe_paged_path(model: PreTrainedModel, group: ShardGroup | None = None) -> tuple[GenericModel, LogitsProbe] | str:
    """Returns the model on the paged path and its logits there, or the reason why it cannot take that path.

    group: the shards of the model; None for a single shard. The model keeps paged attention if it can take the paged
    path, and its own otherwise.
    """
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    choose_attention(model)
    expected = own_logits(model)
    recorder = _Recorder(model)
    restore = install_paged_attention(model)
    try:
        paged = GenericModel(model, recorder)
        actual = short_logits(paged)
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
    restore()
    return reason


def _objection(model: PreTrainedModel, recorder: _Recorder, expected: Tensor, actual: Tensor) -> str | None:
    """Returns the reason why the paged path is wrong for the model; None if it is right."""
    windows, cached = windows_of(model), recorder.cached_layers
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
