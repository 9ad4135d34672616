"""What grammars allow next, computed while the model runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor
from llguidance.torch import fill_next_token_bitmask_par
from numpy.typing import NDArray
from torch import Tensor

from tgi_server.engine.grammar.constraint import Constraint

Words = NDArray[np.int32]  # [masks, words]

_BITS = 32
_MAX_THREADS = 8


class PendingMask:
    """Masks that a thread computes."""

    def __init__(self, bits: Tensor, work: Future[None], device: torch.device) -> None:
        self._bits = bits
        self._work = work
        self._device = device

    def wait(self) -> Tensor:
        """int32 `[constraints, words]` on the device."""
        self._work.result()
        return self._bits.to(self._device, non_blocking=True)


class MaskBuilder:
    """Computes masks in threads of its own, which need no GIL."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Where the model runs on the same cores, a second thread takes more from it than it gives.
        threads = 1 if device.type == "cpu" else max(1, min(_MAX_THREADS, torch.get_num_threads()))
        self._executor = LLExecutor(num_threads=threads)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")

    def start(self, constraints: Sequence[Constraint], vocab_size: int) -> PendingMask:
        """One mask for each; bit i % 32 of word i // 32 says whether token i may follow. vocab_size: of the masks."""
        words = -(-vocab_size // _BITS)
        bits = torch.empty(len(constraints), words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return PendingMask(bits, self._thread.submit(self._fill, constraints, bits), self._device)

    @torch.inference_mode()
    def _fill(self, constraints: Sequence[Constraint], bits: Tensor) -> None:
        words: Words = bits.numpy()  # torch takes longer for a few numbers, or starts threads for them
        open_rows = []
        for row, constraint in enumerate(constraints):
            if constraint.error is not None:
                words[row] = -1  # what is chosen does not matter: the sequence fails
            elif (token := constraint.forced) is not None:
                words[row] = 0
                words[row, token // _BITS] = _bit(token)
            else:
                open_rows.append((constraint, row))
        if open_rows:
            fill_next_token_bitmask_par(self._executor, [(each.matcher, row) for each, row in open_rows], bits)
        self._settle([row for _, row in open_rows], [constraint for constraint, _ in open_rows], words)

    @staticmethod
    def _settle(rows: list[int], constraints: list[Constraint], bits: Words) -> None:
        """Notes where nothing may follow, and forbids the end of a text that may and shall go on."""
        somewhere: NDArray[np.bool_] = bits.any(1)  # type: ignore[assignment]
        going_on = []
        for row, constraint in zip(rows, constraints, strict=True):
            constraint.check()
            if constraint.error is None and not somewhere[row]:
                constraint.error = "the model has no token with which the text could go on"
            if constraint.error is not None:
                bits[row] = -1
            elif constraint.ignore_eos:
                going_on.append(row)
        if going_on:
            others = bits[going_on]
            for token in constraints[0].eos:
                others[:, token // _BITS] &= ~_bit(token)
            bits[going_on] = np.where(others.any(1, keepdims=True), others, bits[going_on])


def _bit(token: int) -> int:
    """As a signed word."""
    bit: int = 1 << token % _BITS
    return bit - 2**_BITS if bit >= 2 ** (_BITS - 1) else bit
