"""TGI's admission policy: when waiting requests join the running ones, and how much of them at once.

A pure object: it is told the state and answers; it keeps none. Its clock is the count of decode steps.
"""

from dataclasses import dataclass
from enum import Enum

from tgi_server.router.scheduling.settings import SchedulerSettings


class Reason(Enum):
    """Why waiting requests are taken in."""

    ROOM = "the running batch is at most half full"
    BACKPRESSURE = "the waiting requests outnumber the running ones by waiting_served_ratio"
    WAIT_EXCEEDED = "max_waiting_tokens decode steps have passed without a prefill"


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """The limits that an operator sets; `SchedulerSettings` says what each means."""

    max_batch_size: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    prefill_chunk_tokens: int
    max_waiting_tokens: int
    waiting_served_ratio: float

    @classmethod
    def of(cls, settings: SchedulerSettings) -> "AdmissionPolicy":
        return cls(**{name: getattr(settings, name) for name in cls.__slots__})

    def reason_to_admit(self, running: int, waiting: int, steps_since_prefill: int) -> Reason | None:
        """None: the waiting requests go on waiting."""
        if waiting == 0 or running >= self.max_batch_size:
            return None
        if 2 * running <= self.max_batch_size:
            return Reason.ROOM
        if waiting > running * self.waiting_served_ratio:
            return Reason.BACKPRESSURE
        if steps_since_prefill >= self.max_waiting_tokens:
            return Reason.WAIT_EXCEEDED
        return None

    def prefill_budget(self, decoding: bool) -> int:
        """Prompt tokens of the next step."""
        if decoding:
            return min(self.prefill_chunk_tokens, self.max_batch_prefill_tokens)
        return self.max_batch_prefill_tokens

    def total_budget(self, held_tokens: int, growth_tokens: int) -> int:
        """KV slots that a request may take when it is admitted, so that the running ones can go on growing."""
        return self.max_batch_total_tokens - held_tokens - growth_tokens
