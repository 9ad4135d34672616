"""States of layers that have no keys (convolutions and recurrences), with one slot for each sequence."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.memory import HOST, give_back, mapped

# Of a layer: its index, and the name of the function that has the state.
Part: TypeAlias = tuple[int, str]

SCRATCH_SLOT = 0


class SequenceStates:
    """The recurrent states of all sequences and layers. A slot has one state of each part, zeros at first.

    Slot 0 is scratch, for rows without a sequence.

    A part is allocated when it is first written, because only then the shape of its state is known.

    generation: a number that changes whenever the tensors are replaced.
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
        return sum(tensor[0].nbytes for tensor in self._parts.values())

    def allocate(self, slots: int, snapshots: int = 0) -> None:
        """Allocates slots 0 .. slots - 1 with zeros, and snapshots after them. Drops the earlier contents."""
        self._first_snapshot, self._slots = slots, slots + snapshots
        self.generation += 1
        for key, tensor in self._parts.items():
            self._parts[key] = tensor.new_empty(0)  # frees it, so that old and new tensor need not fit together
            self._parts[key] = _zeros((self._slots, *tensor.shape[1:]), tensor)
        self._drafted.clear()

    def slot_of(self, snapshot: int) -> int:
        """Returns the slot of a snapshot; the first snapshot has number 1. Raises InvalidCall."""
        slot = self._first_snapshot + snapshot - 1
        if not self._first_snapshot <= slot < self._slots:
            raise InvalidCall(
                f"snapshot {snapshot} does not exist; snapshots go from 1 to {self._slots - self._first_snapshot}"
            )
        return slot

    def slot_tensors(self) -> list[Tensor]:
        """Returns the tensors in which the slots are: [slots, ...] each, contiguous, until the next `allocate`."""
        return [self._parts[key] for key in sorted(self._parts)]

    def forget(self) -> None:
        """Returns the memory of all slots to the system, on a CPU. Their contents are undefined afterwards."""
        for tensor in self._parts.values():
            give_back(tensor.data_ptr(), tensor.nbytes)

    def copy(self, source: int, target: int) -> None:
        """Copies all states of a slot to another one."""
        for tensor in self._parts.values():
            tensor[target] = tensor[source]

    def clear(self, slot: int) -> None:
        """Resets a slot, for a text of which nothing has been computed."""
        for tensor in self._parts.values():
            tensor[slot].zero_()

    def read(self, key: Part, slots: Tensor | slice) -> Tensor | None:
        """Returns the states in some slots, [slots, ...]; None where no state of this part has ever been written."""
        states = self._parts.get(key)
        if states is None:
            return None
        return states[slots] if isinstance(slots, slice) else states.index_select(0, slots)

    def all_slots(self, key: Part, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the states of all slots, [slots, *shape], on a CPU; the caller may write into them."""
        if key not in self._parts:
            self._parts[key] = mapped((self._slots, *shape), dtype)
        return self._parts[key]

    def write(self, key: Part, slots: Tensor | slice, states: Tensor) -> None:
        """Puts states, [slots, ...], into some slots."""
        if key not in self._parts:
            self._parts[key] = _zeros((self._slots, *states.shape[1:]), states)
        if isinstance(slots, slice):
            self._parts[key][slots] = states
        else:
            self._parts[key].index_copy_(0, slots, states)

    def begin_pass(self) -> None:
        """Forgets the drafted tokens of the previous pass; the right ones must have been accepted before."""
        self._drafted.clear()

    def draft(self, slot: int, advance: Callable[[int], None]) -> None:
        """Stores a function that advances a part of a slot by tokens drafted in this pass; the slot stays unchanged."""
        self._drafted.setdefault(slot, []).append(advance)

    def accept(self, slot: int, tokens: int) -> None:
        """Advances a slot by the first `tokens` of the tokens that the last pass had drafted for it."""
        for advance in self._drafted.pop(slot, ()):
            advance(tokens)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns zeros; on a CPU a slot takes no memory before it is used."""
    return mapped(shape, like.dtype) if like.device == HOST else like.new_zeros(shape)
