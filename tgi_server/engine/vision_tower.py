"""The vision tower of a model: what it makes of images, computed in short pieces and cached by content."""

import inspect
import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tgi_server import contract
from tgi_server.contract import Image
from tgi_server.engine.backends.attention.dense import DenseAttention
from tgi_server.engine.errors import InvalidImage
from tgi_server.engine.linear import PackedLinear

_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
# Raised by models for tensors of the wrong shape.
_MODEL_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
# The name of attention in pieces, among those of `transformers`.
_IMPLEMENTATION = "oatmill_pieces"
# Multiplications a second, until pieces have been measured: those of a slow core.
_FIRST_RATE = 5e9
# Rows that are computed together at least: fewer would read weights, keys and values too often.
_LEAST_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """The features of an image, which take the places of its tokens.

    embeddings: [tokens, hidden_size]. added: the same for each of the first decoder layers, to whose output it is added
    (DeepStack, arXiv:2406.04334).
    """

    embeddings: Tensor
    added: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.added))


class Pieces:
    """Cuts the work of a thread into pieces of a time, by the speed of those before, so that others can compute in
    between. A thread that has not begun any computes everything at once.
    """

    def __init__(self) -> None:
        self._rates: defaultdict[str, float] = defaultdict(lambda: _FIRST_RATE)
        self._thread = threading.local()

    @contextmanager
    def cut(self, between: Callable[[], None] | None, seconds: Callable[[], float]) -> Iterator[None]:
        """Cuts what this thread computes in the context.

        between: called before each piece; None: nothing is cut. seconds: returns how long the next piece may take.
        """
        self._thread.between, self._thread.seconds, self._thread.ends_at = between, seconds, 0.0
        try:
            yield
        finally:
            self._thread.between = None

    def pause(self, *_: Any) -> None:
        """Lets others compute, if the piece has taken its time."""
        if getattr(self._thread, "between", None) is not None and time.perf_counter() >= self._thread.ends_at:
            self._begin()

    def compute(
        self, kind: str, work: Callable[[int, int], Tensor], items: int, products: int, least: int = 1
    ) -> list[Tensor]:
        """Returns the results of work(first, end) for all of some items, in one or several pieces.

        kind: of work, each with a speed of its own. products: multiplications of an item. least: items of a piece.
        """
        if getattr(self._thread, "between", None) is None:
            return [work(0, items)]
        results, first = [], 0
        while first < items:
            if self._fitting(kind, products) < min(least, items - first):
                self._begin()
            started = time.perf_counter()
            end = min(items, first + max(least, self._fitting(kind, products)))
            results.append(work(first, end))
            measured = (end - first) * products / max(time.perf_counter() - started, 1e-6)
            self._rates[kind] += 0.2 * (measured - self._rates[kind])
            first = end
        return results

    def _begin(self) -> None:
        """Lets others compute, and begins a piece."""
        self._thread.between()
        self._thread.ends_at = time.perf_counter() + self._thread.seconds()

    def _fitting(self, kind: str, products: int) -> int:
        """Returns how many items of a kind of work fit into the rest of the piece."""
        return int((self._thread.ends_at - time.perf_counter()) * self._rates[kind] / products)


class VisionTower:
    """The part of a model that reads images, computed by `transformers`. Thread-safe.

    Its results are cached by the digest of the image, those that were used last up to a number of bytes.

    memory: that number. token_id: the token in whose places images stand. mrope: image tokens have rotary positions of
    their own. two_way: attention among an image's tokens goes both ways: in "all" layers, in those with a window
    ("windows"), or in none ("").
    """

    def __init__(self, model: PreTrainedModel, memory: int) -> None:
        """model: without its text model; see `load_vision`."""
        base: Any = model.base_model
        self._reader = base if hasattr(base, "get_image_features") else model
        self._projector = getattr(model, "multi_modal_projector", None) if model.config.model_type == "llama4" else None
        self._arguments = tuple(inspect.signature(self._reader.get_image_features).parameters)
        self._dtype, self._device = model.dtype, model.device
        config: Any = model.config
        self.memory = memory
        self.token_id = int(config.image_token_id)
        self.mrope = hasattr(base, "get_rope_index")
        self.two_way = _two_way(config)
        self._cache: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._pieces = _in_pieces(model)

    def encode(
        self,
        image: Image,
        between: Callable[[], None] | None = None,
        piece_seconds: Callable[[], float] = lambda: math.inf,
    ) -> ImageFeatures:
        """Returns what takes the places of an image's tokens. Raises InvalidImage.

        between: called before each piece of what has to be computed, so that others can compute meanwhile; None: it is
        computed at once. piece_seconds: returns about how long the next piece may take.
        """
        with self._lock:
            if image.digest in self._cache:
                self._cache.move_to_end(image.digest)
                return self._cache[image.digest]
        with self._pieces.cut(between, piece_seconds):
            features = self._compute(image)
        with self._lock:
            self._store(image.digest, features)
        return features

    def clear(self) -> None:
        """Empties the cache."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0

    def rope_index(self, ids: Tensor, images: Sequence[Image]) -> Tensor:
        """Returns the rotary positions of a prompt's tokens, [3, tokens] int64. Raises InvalidImage."""
        grids = [tensor for image in images for tensor in image.tensors if tensor.name == "image_grid_thw"]
        if len(grids) != len(images):
            raise InvalidImage("an image has no tensor image_grid_thw")
        try:
            positions, _ = self._reader.get_rope_index(
                ids[None],
                mm_token_type_ids=(ids == self.token_id).int()[None],
                image_grid_thw=torch.cat([_as_tensor(grid) for grid in grids]),
            )
        except _MODEL_ERRORS as error:
            raise InvalidImage(f"images do not fit their tokens in the prompt: {error}") from error
        found: Tensor = positions[:, 0]
        return found

    @torch.inference_mode()
    def _compute(self, image: Image) -> ImageFeatures:
        tensors = {tensor.name: _as_tensor(tensor) for tensor in image.tensors}
        if "pixel_values" not in tensors:
            raise InvalidImage("an image that has to be computed has no tensor pixel_values")
        arguments = {
            name: tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
            if name in self._arguments
        }
        try:
            output = self._reader.get_image_features(**arguments, return_dict=True)
            if self._projector is not None:
                found = self._projector(output.last_hidden_state.flatten(0, -2))
            else:
                found = output.pooler_output
        except torch.OutOfMemoryError:
            raise
        except _MODEL_ERRORS as error:
            shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in image.tensors)
            raise InvalidImage(f"the model cannot read the tensors of an image ({shapes}): {error}") from error
        added = getattr(output, "deepstack_features", None) or ()
        return ImageFeatures(self._joined(found), tuple(self._joined(each) for each in added))

    def _joined(self, features: Tensor | Sequence[Tensor]) -> Tensor:
        """Returns features, [..., hidden_size], of one image or of parts of it as [tokens, hidden_size]."""
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.flatten(0, -2) for part in parts]).to(self._dtype)

    def _store(self, digest: bytes, features: ImageFeatures) -> None:
        if digest in self._cache or features.nbytes > self.memory:
            return
        self._cache[digest] = features
        self._cached_bytes += features.nbytes
        while self._cached_bytes > self.memory:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.nbytes


def _in_pieces(model: PreTrainedModel) -> Pieces:
    """Makes the layers of a model that compute each row alone, and its attention, compute in pieces, and pauses before
    each of its layers.
    """
    pieces = Pieces()
    model.set_attn_implementation(_IMPLEMENTATION)
    for module in model.modules():
        module.pieces = pieces
        if isinstance(module, nn.Linear | PackedLinear):
            products = module.in_features * module.out_features
            module.forward = partial(_rows, pieces, "linear", products, module.forward)  # type: ignore[method-assign]
        elif type(module) is nn.LayerNorm or type(module).__name__.endswith("RMSNorm") or _is_activation(module):
            module.forward = partial(_rows, pieces, type(module).__name__, 0, module.forward)
        for layer in module if isinstance(module, nn.ModuleList) else ():
            layer.register_forward_pre_hook(pieces.pause)
    return pieces


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == activations.__name__ or isinstance(module, nn.GELU | nn.SiLU | nn.ReLU)


def _rows(pieces: Pieces, kind: str, products: int, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Computes a layer some rows at a time. products: multiplications of a row; 0: one for each of its numbers."""
    rows = x.flatten(0, -2)
    products = products or x.shape[-1]
    results = pieces.compute(kind, lambda first, end: forward(rows[first:end]), len(rows), products, _LEAST_ROWS)
    return (results[0] if len(results) == 1 else torch.cat(results)).view(*x.shape[:-1], -1)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Computes attention as `transformers` does, some rows or heads at a time.

    query: [images, heads, tokens, head_dim]. Returns [images, tokens, heads, head_dim].
    """
    images, heads, tokens, size = query.shape
    products = 2 * key.shape[2] * size
    if attention_mask is None and not _is_causal(module, options) and DenseAttention.supports(query, key, value):
        attention = DenseAttention(key, value, options.get("scaling") or size**-0.5)
        rows = query.transpose(1, 2).flatten(0, 1)
        attend_rows = partial(attention.attend, rows)
        results = module.pieces.compute("attention", attend_rows, len(rows), heads * products, _LEAST_ROWS)
        return (results[0] if len(results) == 1 else torch.cat(results)).view(images, tokens, heads, size), None

    def attend(first: int, end: int) -> Tensor:
        part = (each[:, first:end] for each in (query, key, value))
        result: Tensor = sdpa_attention_forward(module, *part, attention_mask, **options)[0]
        return result

    if key.shape[1] != heads:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    results = module.pieces.compute("attention of heads", attend, heads, images * tokens * products)
    return results[0] if len(results) == 1 else torch.cat(results, 2), None


def _is_causal(module: Any, options: Mapping[str, Any]) -> bool:
    """Returns True if tokens attend to those before them only, as `transformers` has it."""
    said = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if said is None else said)


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)


def _two_way(config: Any) -> str:
    """Returns in which layers an image's tokens attend to each other, by a model's configuration."""
    if config.model_type == "gemma3":
        return "all"
    vision_only = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    return "windows" if config.model_type == "gemma4" and vision_only else ""


def _as_tensor(tensor: contract.Tensor) -> Tensor:
    """Returns a tensor of the contract on the host. Raises InvalidImage."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidImage(f"{tensor.name} is of {tensor.dtype}; it must be one of {', '.join(_DTYPES)}")
    count = math.prod(tensor.shape)
    if min(tensor.shape, default=0) < 0 or not count or count * dtype.itemsize != len(tensor.data):
        raise InvalidImage(f"{tensor.name} of the shape {list(tensor.shape)} has {len(tensor.data)} bytes")
    try:
        data = bytearray(tensor.data) if isinstance(tensor.data, bytes) else tensor.data.map()
    except (OSError, ValueError) as error:
        raise InvalidImage(f"{tensor.name} cannot be read from shared memory: {error}") from error
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape)
