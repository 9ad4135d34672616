"""The vision tower of a model, and the cache of its results."""

import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server import contract
from tgi_server.contract import Image
from tgi_server.engine.errors import InvalidImage
from tgi_server.engine.models.spec import Family
from tgi_server.engine.vision.pieces import in_pieces

_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
# Raised by models for tensors of the wrong shape.
_MODEL_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


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


class VisionTower:
    """The part of a model that reads images, computed by `transformers`. Thread-safe.

    Results are cached by the digest of the image; beyond `memory` bytes, the least recently used ones are dropped.

    memory: capacity of the cache in bytes. token_id: the token that images replace. mrope: image tokens have rotary
    positions of their own. two_way: layers in which the tokens of an image attend to each other in both directions:
    "all", those with a window ("windows"), or none ("").
    """

    def __init__(self, model: PreTrainedModel, family: Family, memory: int) -> None:
        """model: without its text model; see `load_vision`. family: its own, not its text model's."""
        base: Any = model.base_model
        self._reader = base if hasattr(base, "get_image_features") else model
        self._projector: Any = model.get_submodule(family.image_projector) if family.image_projector else None
        self._arguments = tuple(inspect.signature(self._reader.get_image_features).parameters)
        self._dtype, self._device = model.dtype, model.device
        config: Any = model.config
        self.memory = memory
        self.token_id = int(config.image_token_id)
        self.mrope = hasattr(base, "get_rope_index")
        self.two_way = family.two_way(config)
        self._cache: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._pieces = in_pieces(model)

    def encode(
        self,
        image: Image,
        between: Callable[[], None] | None = None,
        piece_seconds: Callable[[], float] = lambda: math.inf,
    ) -> ImageFeatures:
        """Returns the features of an image, from the cache or computed. Raises InvalidImage.

        between: called before each piece of the computation, so that others can compute in between; None: no pieces.
        piece_seconds: returns about how many seconds the next piece may take.
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
        return ImageFeatures(self._joined(found), tuple(self._joined(tensor) for tensor in added))

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
