"""How often each token has occurred, kept on the device for the rows whose penalties ask for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tgi_server.engine.memory import to_device


class TokenCounts:
    """A pool of count vectors. It is empty until the first row takes a slot, and doubles when all are taken."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [slots, vocab]
        self._free: list[int] = []

    def take(self, token_ids: Sequence[int]) -> int:
        """A slot that counts `token_ids`. Ids beyond the vocabulary, which no model can choose, are left out."""
        slots, vocab_size = self.counts.shape
        if not self._free:
            grown = max(1, slots)
            self.counts = torch.cat((self.counts, self.counts.new_zeros(grown, vocab_size)))
            self._free.extend(reversed(range(slots, slots + grown)))
        slot = self._free.pop()
        row = self.counts[slot].zero_()
        ids = to_device([i for i in token_ids if i < vocab_size], torch.int64, self.counts.device)
        row.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def record(self, slots: Tensor, token_ids: Tensor, amounts: Tensor) -> None:
        """Counts one more token in each of `slots`: all int64 `[rows]`; an amount of 0 counts nothing."""
        places = slots * self.counts.shape[1] + token_ids
        self.counts.view(-1).scatter_add_(0, places, amounts.to(torch.int32))
