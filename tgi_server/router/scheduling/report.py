"""Reports the queue, the running batch and the calls to the shards as metrics."""

from collections import Counter

from shared.stubs import generate_pb2 as pb
from tgi_server.router.metrics import Method, Metrics
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.scheduling.batch import Batch, WaitingQueue
from tgi_server.router.scheduling.planner import FilterPlan, StepPlan
from tgi_server.router.scheduling.sequence import Sequence


class BatchReport:
    """Reports what the scheduler does to the metrics."""

    def __init__(self, metrics: Metrics, info: pb.InfoResponse, capacity: pb.WarmupResponse) -> None:
        """info, capacity: the shards' responses to Info and Warmup."""
        self._speculates = info.speculate > 0
        self._batches = metrics.batches
        self._load = metrics.load
        self._requests = metrics.requests
        self._load.capacity_tokens = capacity.max_batch_total_tokens
        self._load.block_size = info.block_size

    def queued(self, requests: int) -> None:
        """Reports the number of waiting requests."""
        self._load.waiting = requests

    def sent(self, plan: FilterPlan | StepPlan) -> None:
        if isinstance(plan, FilterPlan):
            self._batches.preempted(plan.preempted)
            return
        self._batches.called(_method(plan))
        if plan.joined:
            self._batches.admitted(len(plan.joined), plan.reason)

    def looked_up(self, sequence: Sequence) -> None:
        """Counts the cached tokens of a prompt."""
        self._batches.looked_up(sequence.prompt_tokens, sequence.cached)

    def answered(self, plan: FilterPlan | StepPlan, response: pb.Answer, seconds: float) -> None:
        """Reports the response to a call. seconds: time since the call was sent."""
        if isinstance(plan, FilterPlan):
            self._batches.filtered(Method.DECODE, seconds)
            return
        step, timings = response.step, response.step.timings
        self._batches.answered(_method(plan), seconds, timings.forward_ns / 1e9, timings.sampling_ns / 1e9)
        if self._speculates:
            self._batches.speculated(step.drafted_tokens, step.accepted_tokens)
            for generations in Counter(generation.request_id for generation in step.generations).values():
                self._requests.accepted_drafts(generations - 1)

    def state(self, waiting: WaitingQueue, batch: Batch, adapters: Adapters) -> None:
        self.queued(len(waiting))
        self._load.running = len(batch)
        self._load.held_tokens, self._load.cached_tokens = batch.memory.held_tokens, batch.memory.cached_tokens
        if len(adapters):
            missing = {sequence.adapter.id for sequence in waiting if sequence.adapter and not sequence.adapter.ready}
            self._load.adapters(adapters.max_loras, (adapter.id for adapter in adapters if adapter.ready), missing)


def _method(plan: StepPlan) -> Method:
    return Method.PREFILL if plan.is_prefill else Method.DECODE
