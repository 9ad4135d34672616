"""Computes masks of the tokens that grammars allow next."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray
from torch import Tensor

from shared.control_groups import usable_cores
from tgi_server.engine.memory import HOST
from tgi_server.engine.sampling.processors import TokenMask
from tgi_server.grammar import Constraint, LimitedThoughts

AnyConstraint = Constraint | LimitedThoughts
MaskWords = NDArray[np.int32]  # [masks, words]

_BITS = 32
_MAX_THREADS = 8


class PendingMask:
    """Masks that may still be being computed by a thread."""

    def __init__(self, bits: Tensor, positions: Sequence[int], work: Future[None] | None, device: torch.device) -> None:
        """bits, positions: as in TokenMask. work: the computation of `bits`; None: it has ended."""
        self._bits = bits
        self._positions = positions
        self._work = work
        self._device = device

    def wait(self) -> TokenMask:
        """Waits for the masks. Returns them on the device."""
        if self._work is not None:
            self._work.result()
        return TokenMask(self._bits.to(self._device, non_blocking=True), self._positions)


class MaskBuilder:
    """Computes masks in threads without the GIL: concurrently with the model, if it leaves some cores free.

    If the model computes on all cores, its threads would have to wait for those that masks delay. So all cores then
    compute the masks first.
    """

    def __init__(self, device: torch.device, spare_cores: int) -> None:
        """spare_cores: number of cores that the model does not use."""
        self._device = device
        cores = spare_cores if spare_cores > 0 else usable_cores()
        self._executor = LLExecutor(num_threads=min(_MAX_THREADS, cores))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks") if spare_cores > 0 else None

    def start(self, constraints: Sequence[AnyConstraint], positions: Sequence[int], vocab_size: int) -> PendingMask:
        """Starts to compute a mask per constraint. positions: their rows of the logits. vocab_size: bits of a mask."""
        words = -(-vocab_size // _BITS)
        bits = torch.empty(len(constraints), words, dtype=torch.int32, pin_memory=self._device != HOST)
        if self._thread is not None:
            return PendingMask(bits, positions, self._thread.submit(self._fill, constraints, bits), self._device)
        self._fill(constraints, bits)
        return PendingMask(bits, positions, None, self._device)

    @torch.inference_mode()
    def _fill(self, constraints: Sequence[AnyConstraint], bits: Tensor) -> None:
        words: MaskWords = bits.numpy()  # torch takes longer for a few numbers, or starts threads for them
        open_rows = []
        for row, constraint in enumerate(constraints):
            if constraint.error is not None:
                words[row] = -1  # allows all tokens: the sequence fails anyway
            elif (token := constraint.jump_forward) is not None:
                words[row] = 0
                words[row, token // _BITS] = _bit(token)
            else:
                open_rows.append((constraint, row))
        if open_rows:
            fill_next_token_bitmask_par(
                self._executor, [(constraint.matcher, row) for constraint, row in open_rows], words
            )
        self._settle([row for _, row in open_rows], [constraint for constraint, _ in open_rows], words)

    @staticmethod
    def _settle(rows: list[int], constraints: list[AnyConstraint], bits: MaskWords) -> None:
        """Sets the error of constraints that allow no token. Applies `ignore_eos` to those that allow others."""
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
    """Returns the token's bit in its word, a signed int32."""
    bit: int = 1 << token % _BITS
    return bit - 2**_BITS if bit >= 2 ** (_BITS - 1) else bit
