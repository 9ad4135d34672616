"""What the scheduler is told at start-up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """TGI's admission limits, and the scheduler's own.

    max_batch_size: requests that run at once.
    max_batch_prefill_tokens: prompt tokens that one step computes while nothing else runs.
    max_batch_total_tokens: KV slots of all running requests together.
    max_waiting_tokens: decode steps after which waiting requests are taken in whatever else holds.
    waiting_served_ratio: as many waiting requests for each running one are taken in at once.
    prefill_chunk_tokens: prompt tokens that one step computes while streams are running; bounds how long a stream
        may pause for somebody else's prompt.
    pipeline_depth: step calls that may be on their way to the shards. With 2 the router handles the tokens of one
        step while the shards compute the next.
    prefix_cache: keep the keys and values of finished requests for prompts that begin alike.
    idle_check_after_s: after so long without anything to do, the books of blocks and prefix cache are checked once.
    recovery_timeout_s, recovery_interval_s: how long shards may take to show that they are well after a failure,
        and how long to wait before they are asked again.
    """

    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int = 256
    max_waiting_tokens: int = 20
    waiting_served_ratio: float = 0.3
    prefill_chunk_tokens: int = 512
    pipeline_depth: int = 2
    prefix_cache: bool = True
    idle_check_after_s: float = 1.0
    recovery_timeout_s: float = 5.0
    recovery_interval_s: float = 1.0
