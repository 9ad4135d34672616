"""The adapter of each row of a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgi_server.engine.memory import to_device


@dataclass(slots=True, eq=False)
class AdapterRows:
    """The rows of a pass in which some have an adapter.

    numbers: [rows] int32 on the device, the number of each row's adapter; 0: none. present: those that occur, but 0;
    None: whichever are there when a recorded step is run.
    wanted: [wanted] int64, the rows of which the head computes logits; None: of all, or of each sequence's last.
    """

    numbers: Tensor
    present: frozenset[int] | None
    wanted: Tensor | None = None
    _by_count: dict[int, Tensor] = field(default_factory=dict)
    _orders: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of_sequences(cls, numbers: Sequence[int], device: torch.device) -> "AdapterRows | None":
        """Returns the rows of a padded pass: one for each sequence. None if none of them has an adapter."""
        present = frozenset(numbers) - {0}
        return cls(to_device(numbers, torch.int32, device), present) if present else None

    def of(self, count: int) -> Tensor:
        """Returns the numbers, [count] int32, for a layer that is given so many rows.

        They are those of the pass, or those whose logits are wanted; or, of a padded pass, several of each sequence.
        """
        if count == len(self.numbers):
            return self.numbers
        if count not in self._by_count:
            if self.wanted is not None and count == len(self.wanted):
                self._by_count[count] = self.numbers[self.wanted]
            else:
                self._by_count[count] = self.numbers.repeat_interleave(count // len(self.numbers))
        return self._by_count[count]

    def order(self, count: int) -> Tensor:
        """Returns the rows of a layer that is given so many, sorted by their adapters' numbers: [count] int64."""
        if count not in self._orders:
            self._orders[count] = self.of(count).argsort(stable=True)
        return self._orders[count]


class CurrentRows:
    """The rows of the pass that runs, for the layers that adapters change; None: none has an adapter.

    attached: there are layers that look here.
    """

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None
        self.attached = False
