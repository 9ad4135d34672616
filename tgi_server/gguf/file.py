"""Reads GGUF files: their metadata, and the places of their tensors, which are mapped, and read when they are needed.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from tgi_server.gguf.paths import GgufError, gguf_parts

# The names of types of quantized weights: those in blocks.
QUANTIZED = frozenset(kind.name for kind, (block, _) in GGML_QUANT_SIZES.items() if block > 1)
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# By the number of a type of metadata; 8 is text, 9 an array.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
# Bounds of the memory for a header; published models need less than a tenth of these.
_MOST_ENTRIES, _MOST_VALUES = 1 << 17, 1 << 22
# Minimum bytes of a metadata entry, and of a tensor's entry.
_LEAST_PAIR, _LEAST_INFO = 13, 24

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. shape: outputs first, inputs last. raw: its bytes, mapped, [..., bytes of a row]."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: Bytes


@dataclass(frozen=True, slots=True)
class Gguf:
    """A model of one GGUF file or several. metadata: values by name; arrays are lists.

    fingerprint: equal for files with equal metadata and tensors of equal shapes, whatever the tensors' values.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    fingerprint: str

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def is_adapter(self) -> bool:
        return self.metadata.get("general.type") == "adapter"


def read_gguf(path: Path, *, texts: bool = True) -> Gguf:
    """Reads a file, or all parts of a model when it is one of several. Raises GgufError.

    texts: with the tokenizer's lists of texts, which may take a hundred megabytes.
    """
    parts = [_read(part, texts) for part in gguf_parts(path)]
    for number, part in enumerate(parts):
        _check_part(part, number, len(parts))
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if again := part.tensors.keys() & tensors.keys():
            raise GgufError(f"{part.path} has the tensor {min(again)}, which another part of the model has, too")
        tensors |= part.tensors
    first = parts[0]
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and expected != len(tensors):
        raise GgufError(f"the parts of {path} have {len(tensors)} tensors, not {expected}; download them again")
    return Gguf(first.path, first.metadata, tensors, " ".join(part.fingerprint for part in parts))


def _check_part(part: Gguf, number: int, count: int) -> None:
    """Raises GgufError if a file's metadata and its name have different part numbers. number: from 0."""
    found, of = part.metadata.get("split.no", number), part.metadata.get("split.count", count)
    # Splitting a small model may leave it in one part, whatever that is called.
    if isinstance(found, int) and isinstance(of, int) and (of > 1 or count > 1) and (found, of) != (number, count):
        raise GgufError(
            f"{part.path} is part {found + 1} of {of} of a model; put all parts into one folder and name the first "
            f"NAME-00001-of-{of:05}.gguf, and so on"
        )


def _read(path: Path, texts: bool) -> Gguf:
    try:
        data: Bytes = np.memmap(path, np.uint8, mode="c")  # private, so that torch may take it; nothing writes to it
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise GgufError(f"{path} cannot be read: {error}; download it again") from error
    header = _Header(path, data, texts)
    if bytes(data[:4]) != _MAGIC:
        raise GgufError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not {_MAGIC!r}")
    header.offset = 4
    version = header.number("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "is big-endian" if swapped else f"has version {version} of the format"
        raise GgufError(f"{path} {what}; little-endian files of versions 2 and 3 are read")
    tensor_count, pair_count = header.number("<Q"), header.number("<Q")
    header.check(tensor_count * _LEAST_INFO + pair_count * _LEAST_PAIR)
    for count, what in ((tensor_count, "tensors"), (pair_count, "metadata")):
        if count > _MOST_ENTRIES:
            raise GgufError(f"{path} has {count:,} {what}; at most {_MOST_ENTRIES:,} are read")
    metadata = dict(header.pair() for _ in range(pair_count))
    infos = [header.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise GgufError(f"{path}: general.alignment is {alignment!r}; download it again")
    start = -(-header.offset // alignment) * alignment
    tensors = {info[0]: _tensor(path, data, start, alignment, *info) for info in infos}
    if len(tensors) < len(infos):
        raise GgufError(f"{path} has two tensors of the same name; download it again")
    return Gguf(path, metadata, tensors, hashlib.sha256(data[: header.offset].tobytes()).hexdigest()[:16])


def _tensor(
    path: Path, data: Bytes, start: int, alignment: int, name: str, kind: int, shape: tuple[int, ...], offset: int
) -> GgufTensor:
    try:
        known = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        raise GgufError(
            f"{path}: tensor {name} has the type {kind}, which is not known; convert the model again"
        ) from None
    if shape[-1] % block or offset % alignment:
        raise GgufError(
            f"{path}: tensor {name}, {known.name} {list(shape)} at {offset}, is not whole; download it again"
        )
    row = shape[-1] // block * size
    first = start + offset
    last = first + math.prod(shape[:-1]) * row
    if last > len(data):
        raise GgufError(
            f"{path} is incomplete from tensor {name} on: it has {len(data):,} of {last:,} bytes; download it again"
        )
    return GgufTensor(name, known, shape, data[first:last].reshape(*shape[:-1], row))


class _Header:
    """Reads one value after the other. Raises GgufError at the end of the file."""

    def __init__(self, path: Path, data: Bytes, texts: bool) -> None:
        self._path = path
        self._texts = texts
        self._data = data.data
        self._values = 0
        self.offset = 0

    def check(self, size: int) -> None:
        if size > len(self._data) - self.offset:
            raise GgufError(
                f"{self._path} is incomplete: its header ends after {len(self._data):,} bytes; download it again"
            )

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        self.check(size)
        (value,) = struct.unpack_from(form, self._data, self.offset)
        self.offset += size
        return value

    def text(self) -> str:
        size = self.number("<Q")
        self.check(size)
        found = bytes(self._data[self.offset : self.offset + size])
        self.offset += size
        return found.decode("utf-8", "replace")

    def pair(self) -> tuple[str, Any]:
        """Returns the name and the value of an entry of the metadata."""
        name, kind = self.text(), self.number("<I")
        if kind == _TEXT:
            return name, self.text()
        if kind == _ARRAY:
            return name, self._array(name, self.number("<I"), self.number("<Q"))
        return name, self.number(self._form(kind))

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Returns the name, the number of the type, the shape and the offset of a tensor."""
        name, dimensions = self.text(), self.number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise GgufError(f"{self._path}: tensor {name} has {dimensions} dimensions; download it again")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        if not all(shape):
            raise GgufError(f"{self._path}: tensor {name} has the shape {list(shape)}; download it again")
        return name, self.number("<I"), shape, self.number("<Q")

    def _array(self, name: str, kind: int, count: int) -> list[Any]:
        form = "<Q" if kind == _TEXT else self._form(kind)  # texts begin with their length
        size = count * struct.calcsize(form)
        self.check(size)
        self._values += count
        if self._values > _MOST_VALUES:
            raise GgufError(
                f"{self._path}: {name} has {count:,} values; at most {_MOST_VALUES:,} of all lists together are read"
            )
        if kind == _TEXT:
            return self._text_list(count)
        found = struct.unpack_from(f"<{count}{form[1]}", self._data, self.offset)
        self.offset += size
        return list(found)

    def _text_list(self, count: int) -> list[str]:
        """Reads texts, or passes them over if they are not wanted. A vocabulary has hundreds of thousands."""
        data, offset = self._data, self.offset
        found: list[str] = []
        for _ in range(count):
            first = offset + 8
            offset = first + int.from_bytes(data[offset:first], "little")
            if offset > len(data):
                break
            if self._texts:
                found.append(str(data[first:offset], "utf-8", "replace"))
        self.check(offset - self.offset)
        self.offset = offset
        return found

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise GgufError(f"{self._path}: metadata has a value of the type {kind}, which is not read")
        return _SCALARS[kind]
