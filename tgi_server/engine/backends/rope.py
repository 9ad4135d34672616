"""Rotary position embeddings: tables that are computed once, for texts of all lengths in one batch."""

from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.models.spec import RopeSpec

_FIXED = "fixed"
_TABLE_STEP = 2048  # positions


class RotaryTable:
    """The cosines and sines of a model's rotary embedding, computed once for each position."""

    def __init__(self, rope: Any, spec: RopeSpec) -> None:
        """rope: an embedding such as LlamaRotaryEmbedding of `transformers`; None: spec has the number of elements.
        spec: selects one of its tables.
        """
        self._rope = rope if spec.rotated is None else PlainRope(spec.rotated)
        self._spec = spec
        self._options = {} if spec.layer_type is None else {"layer_type": spec.layer_type}
        self._name = "inv_freq" if spec.layer_type is None else f"{spec.layer_type}_inv_freq"
        self._frequencies: Tensor | None = None
        self._tables: list[Tensor] = []
        self._axes: Tensor | None = None  # of three positions the one that turns each element: [rotated] int64

    def tables(self, like: Tensor, length: int) -> list[Tensor]:
        """Returns the cosines and the sines, [positions, rotated] each, of at least `length` positions.

        like: a tensor of the dtype and device of hidden states. Frequencies that are not fixed yet are those of a text
        of `length` tokens.
        """
        if _depends(_kind(self._rope)):
            return self._turns(like, torch.arange(length, device=like.device))
        frequencies = getattr(self._rope, self._name)  # which may have changed in place
        if self._frequencies is None or not torch.equal(frequencies, self._frequencies):
            self._frequencies, self._tables = frequencies.clone(), []
        known = len(self._tables[0]) if self._tables else 0
        if length > known:
            missing = torch.arange(known, -(-length // _TABLE_STEP) * _TABLE_STEP, device=like.device)
            added = self._turns(like, missing)
            self._tables = [torch.cat(parts) for parts in zip(self._tables, added, strict=True)] if known else added
        return self._tables

    def at(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cosines and the sines of some positions, [1, positions, rotated] each.

        like: as in `tables`. positions: [positions] int64, or [3, positions] of time, height and width.
        """
        positions = positions[None] if positions.dim() == 1 else positions[:, None]
        turns = self._rope(like, position_ids=positions, **self._options)
        return repeated(turns, self._spec.table, like.dtype)

    def frequencies(self) -> Tensor | None:
        """Returns what positions are multiplied by, [rotated / 2] float32; None if that depends on a text's length."""
        known: Tensor | None = getattr(self._rope, self._name, None)
        return None if _depends(_kind(self._rope)) else known

    def gathered(self, like: Tensor, length: int, positions: Tensor) -> list[Tensor]:
        """Returns the cosines and the sines of some positions, [positions, rotated] each, taken from `tables`.

        length: more than any position. positions: [3, positions] int64.
        """
        if self._axes is None:
            sines = [self.at(like, torch.eye(3, dtype=torch.int64, device=like.device)[:, axis : axis + 1])[1][0, 0]
                     for axis in range(3)]  # fmt: skip
            self._axes = torch.stack(sines).abs().argmax(0)
        places = positions[self._axes].transpose(0, 1)
        return [table.gather(0, places) for table in self.tables(like, length)]

    def _turns(self, like: Tensor, positions: Tensor) -> list[Tensor]:
        return [each[0].contiguous() for each in self.at(like, positions)]


class PlainRope(nn.Module):
    """Rotary positions of the first elements of heads (Su et al. 2021), as models such as GPT-J compute them."""

    def __init__(self, rotated: int) -> None:
        super().__init__()
        self.inv_freq = 1.0 / 10000 ** (torch.arange(0, rotated, 2, dtype=torch.int64) / rotated)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, [..., rotated / 2], of positions, [...] int64."""
        self.inv_freq = self.inv_freq.to(x.device)
        angles = position_ids[..., None].float() * self.inv_freq
        return angles.cos(), angles.sin()


def repeated(tables: tuple[Tensor, Tensor] | Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, [..., rotated], in which both halves are equal, as kernels read them.

    kind: form of the given tables; see `table` of RopeSpec.
    """
    cosine, sine = (tables.real, tables.imag) if isinstance(tables, Tensor) else tables
    if kind == "pairs":
        cosine, sine = cosine[..., ::2], sine[..., ::2]
    copies = 1 if kind == "halves" else 2
    return torch.cat([cosine] * copies, -1).to(dtype), torch.cat([sine] * copies, -1).to(dtype)


class LengthDependentRope:
    """A model's rotary embeddings whose frequencies depend on a text's length: the types "dynamic" and "longrope".

    Most models have none. `transformers` chooses the frequencies in every pass, by the furthest position in the pass.
    In a batch, the length of one request would then change the tokens of another one, and cached keys could have other
    frequencies than new ones. Here the frequencies are chosen once, for the longest text that is accepted, as in vLLM.
    Up to the length of texts in the model's first training, each request gets the same tokens as if it ran alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[tuple[Any, Any]] = [
            (module, kind) for module in model.modules() if _depends(kind := _kind(module))
        ]

    def fix(self, length: int) -> None:
        """Fixes the frequencies to those of a text of `length` tokens, whatever a pass holds."""
        for module, kind in self._modules:
            module.rope_type = kind
            for layer_type in kind if isinstance(kind, dict) else (None,):
                _visit(module, 0, layer_type)  # forgets the length of the last visit
                _visit(module, length - 1, layer_type)
            module.rope_type = dict.fromkeys(kind, _FIXED) if isinstance(kind, dict) else _FIXED


def _kind(module: nn.Module) -> Any:
    """Returns the type of an embedding, or with Gemma's models one for each type of layer."""
    return getattr(module, "rope_type", None)


def _depends(kind: Any) -> bool:
    if isinstance(kind, dict):
        return any(_depends(each) for each in kind.values())
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _visit(module: nn.Module, position: int, layer_type: str | None) -> None:
    device = next(module.buffers()).device
    options = {} if layer_type is None else {"layer_type": layer_type}
    module(torch.zeros(1, device=device), torch.tensor([[position]], device=device), **options)
