"""States of layers without keys: convolutions and recurrences have states, one slot for each sequence."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.memory import HOST, mapped

# Of a layer: its index, and the name of the function that has the state.
Part: TypeAlias = tuple[int, str]

SCRATCH_SLOT = 0


class SequenceStates:
    """The states of all sequences and layers. A slot has one of each part, zeros while nothing is computed.

    Slot 0 is scratch: what nobody has joined is computed there.

    A part comes to be when it is first written, since only its function knows the shape of a state.

    generation: changes when the tensors are other ones.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._slots = 1
        self._first_snapshot = 1
        self._parts: dict[Part, Tensor] = {}
        self._drafted: dict[int, list[Callable[[int], None]]] = {}

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot, of those parts that have been written so far."""
        return sum(part[0].nbytes for part in self._parts.values())

    def allocate(self, slots: int, snapshots: int = 0) -> None:
        """Allocates slots 0 .. slots - 1 with zeros, and snapshots behind them. Drops the earlier contents."""
        self._first_snapshot, self._slots = slots, slots + snapshots
        self.generation += 1
        for key, part in self._parts.items():
            self._parts[key] = part.new_empty(0)  # or both the old and the new one would have to fit
            self._parts[key] = _zeros((self._slots, *part.shape[1:]), part)
        self._drafted.clear()

    def slot_of(self, snapshot: int) -> int:
        """Returns the slot in which a snapshot lies; the first one has number 1. Raises InvalidCall."""
        slot = self._first_snapshot + snapshot - 1
        if not self._first_snapshot <= slot < self._slots:
            raise InvalidCall(
                f"snapshot {snapshot} does not exist; snapshots go from 1 to {self._slots - self._first_snapshot}"
            )
        return slot

    def copy(self, source: int, target: int) -> None:
        """Copies all states of a slot to another one."""
        for part in self._parts.values():
            part[target] = part[source]

    def clear(self, slot: int) -> None:
        """Resets a slot, for a text of which nothing has been computed."""
        for part in self._parts.values():
            part[slot].zero_()

    def read(self, part: Part, slots: Tensor | slice) -> Tensor | None:
        """Returns the states in some slots, [slots, ...]; None where no state of this part has ever been written."""
        states = self._parts.get(part)
        if states is None:
            return None
        return states[slots] if isinstance(slots, slice) else states.index_select(0, slots)

    def all_slots(self, part: Part, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the states of all slots, [slots, *shape], on a CPU; who calls writes into them."""
        if part not in self._parts:
            self._parts[part] = mapped((self._slots, *shape), dtype)
        return self._parts[part]

    def write(self, part: Part, slots: Tensor | slice, states: Tensor) -> None:
        """Puts states, [slots, ...], into some slots."""
        if part not in self._parts:
            self._parts[part] = _zeros((self._slots, *states.shape[1:]), states)
        if isinstance(slots, slice):
            self._parts[part][slots] = states
        else:
            self._parts[part].index_copy_(0, slots, states)

    def begin_pass(self) -> None:
        """Forgets the drafted tokens of the pass before: those that were right have been accepted by now."""
        self._drafted.clear()

    def draft(self, slot: int, advance: Callable[[int], None]) -> None:
        """Notes how a part of a slot, which stays as it is, advances by some of the tokens drafted in this pass."""
        self._drafted.setdefault(slot, []).append(advance)

    def accept(self, slot: int, tokens: int) -> None:
        """Advances a slot by the first `tokens` of the tokens that the last pass had drafted for it."""
        for advance in self._drafted.pop(slot, ()):
            advance(tokens)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns zeros; on a CPU a slot takes no memory before it is used."""
    return mapped(shape, like.dtype) if like.device == HOST else like.new_zeros(shape)


def causal_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Convolves each channel with the tokens up to the own one.

    hidden_states: [texts, channels, tokens]. weight: [channels, width]. initial_state: the last inputs before these,
    [texts, channels, width - 1]. Returns the outputs, and the state behind them.
    """
    before = weight.shape[-1] - 1
    if initial_state is None:
        initial_state = hidden_states.new_zeros(*hidden_states.shape[:2], before)
    inputs = torch.cat([initial_state, hidden_states], dim=-1)
    tokens, wide, taps = hidden_states.shape[-1], inputs.float(), weight.float()
    # A sum over the few taps: torch's convolution of many channels, each by itself, takes several times as long.
    convolved = wide[..., :tokens] * taps[:, :1]
    for tap in range(1, before + 1):
        convolved.addcmul_(wide[..., tap : tap + tokens], taps[:, tap : tap + 1])
    if bias is not None:
        convolved += bias[:, None]
    convolved = convolved.to(weight.dtype)
    if activation is not None:
        convolved = ACT2FN[activation](convolved)
    return convolved.to(hidden_states.dtype), inputs[..., inputs.shape[-1] - before :]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Computes the gated delta rule (Yang et al., 2024) or Kimi's, one token after the other, for few tokens.

    query, key: [texts, tokens, key_heads, size]. value: [texts, tokens, heads, value_size]. beta: [texts, tokens,
    heads]. g: the same, or [texts, tokens, heads, size]. initial_state: [texts, heads, size, value_size]; it is
    changed. Returns the outputs, and the state behind them.
    """
    heads, size = value.shape[2], key.shape[3]
    state = initial_state
    if state is None:
        state = value.new_zeros(len(value), heads, size, value.shape[3], dtype=torch.float32)
    query, key = (_normalized(each.float()).repeat_interleave(heads // each.shape[2], dim=2) for each in (query, key))
    query = query * size**-0.5
    decay = g.float().exp()
    decay = decay[..., None, None] if decay.dim() == 3 else decay[..., None]
    rates, values = beta.float()[..., None], value.float()
    memory, outputs = state.flatten(0, 1), []
    for token in range(value.shape[1]):
        state.mul_(decay[:, token])
        keys = key[:, token].flatten(0, 1)
        known = torch.bmm(keys[:, None], memory)
        change = (values[:, token].flatten(0, 1)[:, None] - known) * rates[:, token].flatten(0, 1)[:, None]
        memory.baddbmm_(keys[:, :, None], change)
        outputs.append(torch.bmm(query[:, token].flatten(0, 1)[:, None], memory).view(len(value), 1, heads, -1))
    return torch.cat(outputs, dim=1).to(value.dtype), state


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Scans as Mamba does (Gu and Dao, 2023), from a state on; the function of `transformers` begins with zeros.

    hidden_states, dt, z: [texts, channels, tokens]. A: [channels, state]. B, C: [texts, state, tokens]. D, delta_bias:
    [channels]. initial_state: [texts, channels, state]. Returns the outputs, and the state behind them.
    """
    step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    step = (torch.nn.functional.softplus(step) if delta_softplus else step).float()
    inputs, into, out_of = step * hidden_states.float(), B.float(), C.float()
    state = initial_state if initial_state is not None else A.new_zeros(len(dt), *A.shape, dtype=torch.float32)
    outputs = []
    for token in range(dt.shape[-1]):
        decay = torch.exp(step[..., token, None] * A)
        state = state * decay + inputs[..., token, None] * into[:, None, :, token]
        outputs.append(state @ out_of[..., token, None])
    output = torch.cat(outputs, dim=-1)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * torch.nn.functional.silu(z)
    return output.to(hidden_states.dtype), state
