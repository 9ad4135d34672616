"""What one step chose, on the device and on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_server.engine.sampling.logprobs import keep_top


@dataclass(slots=True)
class Sampled:
    """token_ids: int64 `[n]` on the device; they may be replaced before they are copied or accepted.

    logprobs: float32, one for each position in `logprob_positions`. top_ids and top_logprobs: `[k, width]`, a row
    for each position in `top_positions`, which asked for `top_counts` tokens. Positions are rows of the logits.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    logprob_positions: Sequence[int] = ()
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_positions: Sequence[int] = ()
    top_counts: Sequence[int] = ()

    def start_copy(self) -> "PendingTokens":
        """Starts one copy of everything to the host and returns at once."""
        parts = [self.token_ids]
        # float64 holds ids and float32 numbers alike without loss.
        parts.extend(part.flatten() for part in (self.logprobs, self.top_ids, self.top_logprobs) if part is not None)
        packed = parts[0] if len(parts) == 1 else torch.cat([part.to(torch.float64) for part in parts])
        if packed.device.type != "cuda":
            return PendingTokens(self, packed, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return PendingTokens(self, host, done)

    def to_host(self) -> "Tokens":
        """Copies everything to the host and waits for it."""
        return self.start_copy().wait()


@dataclass(frozen=True, slots=True)
class Tokens:
    """ids: one for each row of the logits. logprobs and top_tokens (id, logprob): by position, where asked for."""

    ids: list[int]
    logprobs: dict[int, float]
    top_tokens: dict[int, list[tuple[int, float]]]


class PendingTokens:
    """A copy under way."""

    def __init__(self, sampled: Sampled, host: Tensor, done: torch.cuda.Event | None) -> None:
        self._sampled = sampled
        self._host = host
        self._done = done

    def wait(self) -> Tokens:
        """Waits for the copy, not for what was put on the device after it."""
        if self._done is not None:
            self._done.synchronize()
        sampled, values = self._sampled, self._host.tolist()
        end = sampled.token_ids.shape[0]
        ids = [int(value) for value in values[:end]]
        logprobs = dict(zip(sampled.logprob_positions, values[end:], strict=False))
        top_tokens = {}
        if sampled.top_ids is not None:
            width = sampled.top_ids.shape[1]
            begin = end + len(sampled.logprob_positions)
            offset = width * len(sampled.top_positions)
            for position, count in zip(sampled.top_positions, sampled.top_counts, strict=True):
                top_ids = [int(value) for value in values[begin : begin + width]]
                top_tokens[position] = keep_top(top_ids, values[begin + offset : begin + offset + width], count)
                begin += width
        return Tokens(ids, logprobs, top_tokens)
