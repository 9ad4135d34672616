"""Functions over tokens that have states, in the CPU's kernels: all texts of a pass in one call, states in their slots.

Each takes the arguments of the function of `transformers` that it replaces, for the tokens of a pass, [1, ...]; a
function that returns the states of all slots, of a shape and a dtype; and the runs of the pass. It returns the output
alone. What the kernels do not have, `supports` refuses; plain torch then computes it (`states.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import ForwardMetadata
from tgi_server.engine.backends.states import SequenceStates

# Returns the states of all slots, [slots, *shape].
StatesOf: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
_Arguments: TypeAlias = Mapping[str, Any]
# Parts of a Mamba layer's channels that threads compute by themselves: as many as divide its channels.
_MAMBA_PARTS = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Runs:
    """Neighbouring tokens of the same text in a pass.

    runs: [runs, 4] int64: the first token, number of tokens, slot, 1 if the slot gets the state behind them. saves:
    [saves, 3] int64: copies of the state on the way, by run, number of its tokens before, and slot.
    """

    runs: Tensor
    saves: Tensor

    @staticmethod
    def of_pass(metadata: ForwardMetadata, states: SequenceStates) -> "Runs":
        rows, saves = metadata.decoding, []
        runs = [(row, 1, slot, 1) for row, slot in enumerate(metadata.state_slots[:rows])]
        for chunk, slot in zip(metadata.chunks, metadata.state_slots[rows:], strict=True):
            saves += [(len(runs), tokens, states.slot_of(snapshot)) for tokens, snapshot in chunk.saves]
            runs.append((chunk.start, chunk.length, slot, int(not chunk.drafted)))
        return Runs(torch.tensor(runs), torch.tensor(saves, dtype=torch.int64).view(-1, 3))

    @staticmethod
    def of_text(tokens: int, slot: int) -> "Runs":
        return Runs(torch.tensor([(0, tokens, slot, 1)]), torch.empty(0, 3, dtype=torch.int64))


class KernelFunction(ABC):
    """One function over tokens of one layer."""

    @abstractmethod
    def supports(self, arguments: _Arguments) -> bool:
        """Returns True if the kernel computes what these arguments say."""

    @abstractmethod
    def __call__(self, arguments: _Arguments, states: StatesOf, runs: Runs) -> Tensor:
        """Returns what the function returns for these arguments, and moves the states on."""


class Convolution(KernelFunction):
    """`causal_conv1d_fn`."""

    def __init__(self) -> None:
        self._taps: Tensor | None = None
        self._bias: Tensor | None = None

    def supports(self, arguments: _Arguments) -> bool:
        known = arguments.get("activation") in (None, "silu", "swish")
        width: int = arguments["weight"].shape[-1]
        return known and arguments["weight"].dtype == arguments["hidden_states"].dtype and 2 <= width <= 16

    def __call__(self, arguments: _Arguments, states: StatesOf, runs: Runs) -> Tensor:
        weight, x = arguments["weight"], _rows(arguments["hidden_states"][0].t())
        if self._taps is None:
            bias = arguments.get("bias")
            self._taps, self._bias = weight.float().t().contiguous(), None if bias is None else bias.float()
        state = states((weight.shape[1] - 1, weight.shape[0]), x.dtype)
        activate = arguments.get("activation") is not None
        output = torch.ops.oatmill.convolve(x, self._taps, self._bias, state, runs.runs, runs.saves, activate)
        return output.t().unsqueeze(0)


class DeltaRule(KernelFunction):
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""

    def supports(self, arguments: _Arguments) -> bool:
        value: Tensor = arguments["value"]
        return arguments["query"].dtype == arguments["key"].dtype == value.dtype

    def __call__(self, arguments: _Arguments, states: StatesOf, runs: Runs) -> Tensor:
        query, key, value = (_rows(arguments[name][0]) for name in ("query", "key", "value"))
        gates, rates = (arguments[name][0].float().contiguous() for name in ("g", "beta"))
        state = states((value.shape[1], key.shape[2], value.shape[2]), torch.float32)
        normalised = bool(arguments.get("use_qk_l2norm_in_kernel"))
        places = state, runs.runs, runs.saves
        return torch.ops.oatmill.delta_rule(query, key, value, gates, rates, *places, normalised).unsqueeze(0)


class Mamba2(KernelFunction):
    """`mamba2_chunk_scan`."""

    _ALL: ClassVar = (0.0, float("inf"))

    def supports(self, arguments: _Arguments) -> bool:
        like = arguments["hidden_states"].dtype
        return arguments.get("z") is None and all(arguments[name].dtype == like for name in ("dt", "B", "C"))

    def __call__(self, arguments: _Arguments, states: StatesOf, runs: Runs) -> Tensor:
        x, into, out_of = (_rows(arguments[name][0]) for name in ("hidden_states", "B", "C"))
        skip, bias = (_wide(arguments.get(name)) for name in ("D", "dt_bias"))
        state = states((x.shape[1], into.shape[2], x.shape[2]), torch.float32)
        least, most = arguments.get("dt_limit", self._ALL)
        steps = _rows(arguments["dt"][0]), bool(arguments.get("dt_softplus")), float(least), float(most)
        rates = arguments["A"].float().contiguous()
        places = state, runs.runs, runs.saves
        output: Tensor = torch.ops.oatmill.mamba2(x, steps[0], rates, into, out_of, skip, bias, *places, *steps[1:])
        return output.unsqueeze(0)


class Mamba(KernelFunction):
    """`mamba_selective_scan`."""

    def __init__(self) -> None:
        self._rates: Tensor | None = None

    def supports(self, arguments: _Arguments) -> bool:
        like = arguments["hidden_states"].dtype
        gate = arguments.get("z")
        return all(arguments[name].dtype == like for name in ("dt", "B", "C")) and (gate is None or gate.dtype == like)

    def __call__(self, arguments: _Arguments, states: StatesOf, runs: Runs) -> Tensor:
        x, into, out_of = (_rows(arguments[name][0].t()) for name in ("hidden_states", "B", "C"))
        gate, bias, steps = arguments.get("z"), arguments.get("delta_bias"), arguments["dt"]
        if self._rates is None:
            self._rates = arguments["A"].float().t().contiguous()
        if bias is not None:
            steps = steps + bias.to(steps.dtype)[..., None]
        if arguments.get("delta_softplus"):
            steps = torch.nn.functional.softplus(steps)
        parts = mamba_parts(x.shape[1])
        state = states((parts, into.shape[1], x.shape[1] // parts), torch.float32)
        gates = None if gate is None else _rows(gate[0].t())
        places = state, runs.runs, runs.saves
        skip = _wide(arguments.get("D"))
        output = torch.ops.oatmill.mamba(x, _rows(steps[0].t()), self._rates, into, out_of, skip, gates, *places)
        return output.t().unsqueeze(0)


def mamba_parts(channels: int) -> int:
    """Returns the number of parts of a Mamba layer's channels."""
    return next(each for each in _MAMBA_PARTS if channels % each == 0)


def _rows(x: Tensor) -> Tensor:
    """Returns a tensor whose last dimension is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()
