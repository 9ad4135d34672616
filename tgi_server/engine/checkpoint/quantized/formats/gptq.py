"""GPTQ (Frantar et al. 2022), in the layout of AutoGPTQ and its successors.

Of a layer with K inputs and N outputs, in b bits: `qweight`, [K * b / 32, N] int32, low bits first along K; `qzeros`,
[groups, N * b / 32]; `scales`, [groups, N]; `g_idx`, [K], the group of each input. Zeros are stored lower by one,
except in the format that calls itself gptq_v2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.checkpoint.quantized.formats.by_layer import group_size_of, layer_settings
from tgi_server.engine.checkpoint.quantized.source import (
    FLOATS,
    Files,
    QuantizedTensor,
    codes_of,
    parts_of,
    read,
    read_groups,
    size,
    unpacked,
    whole_numbers,
    words_of,
)
from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel

BITS = range(2, 9)


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """bits: of a code. group_size: inputs that share a scale; None: all. stored_zeros: 1 where zeros are one lower.

    others: bits and group sizes of layers that differ, by the settings; the shapes of tensors tell which layers do.
    """

    bits: int
    group_size: int | None
    stored_zeros: int
    others: tuple[tuple[int | None, int | None], ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "GptqFormat":
        """Raises UnsupportedModel for what is not read."""
        layout = "marlin" if settings.get("is_marlin_format") else str(settings.get("checkpoint_format") or "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"the GPTQ checkpoint is serialised for the kernel {layout}; take the same model in the format gptq"
            )
        bits = int(settings["bits"])
        if bits not in BITS:
            raise UnsupportedModel(f"the GPTQ checkpoint has {bits} bits; from 2 to 8 can be read")
        size = int(settings.get("group_size", -1))
        others = tuple(layer_settings(settings, BITS))
        return cls(bits, size if size > 0 else None, 0 if layout == "gptq_v2" else 1, others)

    def __str__(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one group"
        return f"GPTQ, {self.bits} bits, {groups}" + (", others in some layers" if self.others else "")

    def of_layer(self, files: Files, path: str) -> tuple[int, int | None]:
        """Returns the bits and the group size of a layer. Raises InvalidWeights if no bits fit its tensors."""
        if not self.others:
            return self.bits, self.group_size
        words, outputs = size(files, f"{path}.qweight")
        groups, columns = size(files, f"{path}.qzeros")
        order = f"{path}.g_idx"
        known = size(files, order, 1)[0] if order in files else None
        for bits in (self.bits, *(bits for bits, _ in self.others if bits), *BITS):
            inputs = words * 32 // bits if known is None else known
            if words_of(outputs, bits) == columns and words_of(inputs, bits) == words:
                sizes = [self.group_size, *(size if size > 0 else None for _, size in self.others if size)]
                return bits, group_size_of(f"{path}.qzeros", inputs, groups, sizes)
        raise InvalidWeights(
            f"tensor {path}.qweight has the shape {[words, outputs]} and {path}.qzeros {[groups, columns]}, which fit "
            f"no number of bits from {BITS[0]} to {BITS[-1]}; is the download complete?"
        )


def sources(files: Files, settings: GptqFormat) -> list[QuantizedTensor]:
    return [_source(name.removesuffix(".qweight"), files, settings) for name in files if name.endswith(".qweight")]


def _source(path: str, files: Files, settings: GptqFormat) -> QuantizedTensor:
    names = [f"{path}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]
    parts = parts_of(files, names[:3], names[3:])
    bits, layer_group_size = settings.of_layer(files, path)
    words, outputs = size(files, names[0])
    inputs = size(files, names[3], 1)[0] if names[3] in parts else words * 32 // bits

    def weights() -> Iterator[QuantizedWeight]:
        group_size = layer_group_size or inputs
        count = -(-inputs // group_size)
        codes = read(files, names[0], (words_of(inputs, bits), outputs), dtypes=(torch.int32,))
        zeros = read(files, names[1], (count, words_of(outputs, bits)), dtypes=(torch.int32,))
        scales = read(files, names[2], (count, outputs), dtypes=FLOATS)
        if names[3] in parts:
            groups = read_groups(files, names[3], inputs, count)
        else:
            groups = torch.arange(inputs) // group_size
        numbers = unpacked(zeros.T, bits, outputs).float() + settings.stored_zeros
        yield whole_numbers(codes_of(codes.T, bits, inputs), numbers, scales.T.float(), bits, groups)

    return QuantizedTensor(f"{path}.weight", files, parts, (outputs, inputs), weights)


def tensors(weight: QuantizedWeight, bits: int) -> dict[str, Tensor]:
    """Returns the tensors that stand for a weight of whole numbers in the format gptq, by the ends of their names.

    bits: 4 or 8. Zeros are from 1 on.
    """
    zeros = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
    codes, zeros = (weight.single_codes if weight.codebook is not None else weight.codes).int(), zeros.int()
    if weight.codebook is None:  # of 8 bits, from -128 on
        codes, zeros = codes + 128, zeros + 128
    return {
        "qweight": _packed(codes.T, bits),
        "qzeros": _packed(zeros - 1, bits).T,
        "scales": weight.scales.T.half(),
        "g_idx": weight.groups.int(),
    }


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Returns [words, n] int32 of numbers, [count, n] int32, low bits first."""
    places = 32 // bits
    rows = pad(numbers, (0, 0, 0, -len(numbers) % places)).unflatten(0, (-1, places))
    words = torch.zeros_like(rows[:, 0])
    for place in range(places):
        words |= rows[:, place] << place * bits
    return words
