"""Scheduling without a network: the planner's calls are executed by a simulated shard at once, and answered later."""

from collections import deque
from collections.abc import Callable
from typing import Any

from shared.stubs import generate_pb2 as pb
from tests.recording_sink import RecordingSink, recorded_request
from tests.simulated_shard import SimulatedShard, expected_tokens
from tgi_server.router.errors import GenerationFailed
from tgi_server.router.request import ValidRequest
from tgi_server.router.scheduling.admission import AdmissionPolicy
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.delivery import Delivery
from tgi_server.router.scheduling.memory import Memory
from tgi_server.router.scheduling.padded_memory import PaddedMemory
from tgi_server.router.scheduling.paged_memory import PagedMemory
from tgi_server.router.scheduling.planner import Call, Planner
from tgi_server.router.scheduling.queue import WaitingQueue
from tgi_server.router.scheduling.sequence import Sequence


class Fault(Exception):
    """Raised where a test wants the scheduling of one request to break."""


class Simulation:
    """The shard runs calls in the order in which they were sent, so it makes no difference when it runs them."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        *,
        paged: bool = True,
        prefix_cache: bool = True,
        late_end: bool = False,
        pipeline_depth: int = 2,
        max_batch_size: int = 8,
        max_batch_prefill_tokens: int = 64,
        prefill_chunk_tokens: int = 16,
        max_waiting_tokens: int = 4,
        waiting_served_ratio: float = 0.3,
    ) -> None:
        self.shard = SimulatedShard(num_blocks, block_size, max_batch_size, paged=paged, late_end=late_end)
        total = num_blocks * block_size
        self.policy = AdmissionPolicy(
            max_batch_size,
            max_batch_prefill_tokens,
            total,
            prefill_chunk_tokens,
            max_waiting_tokens,
            waiting_served_ratio,
        )
        self.memory: Memory = (
            PagedMemory(num_blocks, block_size, prefix_cache=prefix_cache) if paged else PaddedMemory(total)
        )
        self.queue = WaitingQueue()
        self.batch = Batch(self.memory.block_size)
        self.delivery = Delivery(self.queue, self.batch, self.memory)
        self.planner = Planner(self.queue, self.batch, self.memory, self.policy, pipeline_depth, self.delivery.fault)
        self.faults: dict[int, tuple[str, bool]] = {}
        for part, methods in (
            (self.memory, ("admit", "grow", "computed", "release")),
            (self.batch, ("join", "compute", "grown")),
            (self.queue, ("take", "put_back")),
        ):
            for method in methods:
                setattr(part, method, self._breakable(method, getattr(part, method)))
        self.answers: deque[pb.StepResponse | None] = deque()  # None: of a FilterBatch
        self.sent: list[Call] = []
        self.requests: dict[int, tuple[ValidRequest, RecordingSink, int | None]] = {}

    def submit(
        self, input_ids: list[int], max_new_tokens: int = 8, *, stop_after: int | None = None, **parameters: object
    ) -> RecordingSink:
        request, sink = recorded_request(
            len(self.requests) + 1, input_ids, max_new_tokens, stop_after=stop_after, **parameters
        )
        self.requests[request.id] = (request, sink, stop_after)
        sequence = Sequence(request)
        self.memory.check_length(sequence)
        self.queue.add(sequence)
        return sink

    def break_scheduling(self, request_id: int, method: str, *, done: bool) -> None:
        """From now on `method` raises for the request: after it has done its work if `done`, else before it begins."""
        self.faults[request_id] = (method, done)

    def _breakable(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(sequence: Sequence, *arguments: Any) -> Any:
            fault, done = self.faults.get(sequence.id, ("", False))
            if fault == name and not done:
                raise Fault(name)
            result = method(sequence, *arguments)
            if fault == name:
                raise Fault(name)
            return result

        return call

    def cancel(self, request_id: int) -> None:
        sequence = self.batch.get(request_id)
        if not self.queue.cancel(request_id) and sequence is not None:
            self.delivery.drop(sequence)

    def send(self) -> Call | None:
        """Sends the next call, if there is one."""
        call = self.planner.next_call(sum(answer is not None for answer in self.answers))
        if call is None:
            return None
        self.sent.append(call)
        for sequence in call.joined:
            if not sequence.started:
                self.delivery.started(sequence)
        message = call.message
        if isinstance(message, pb.PrefillRequest):
            self.answers.append(self.shard.prefill(message))
        elif isinstance(message, pb.DecodeRequest):
            self.answers.append(self.shard.decode(message))
        else:
            self.shard.filter_batch(message)
            self.answers.append(None)
        return call

    def receive(self) -> bool:
        """Delivers the oldest answer, if one is due."""
        if not self.answers:
            return False
        answer = self.answers.popleft()
        if answer is not None:
            self.shard.collected(answer)
            self.delivery.deliver(answer)
        return True

    def fail(self) -> None:
        """A step fails: the shard loses its batch."""
        self.answers.clear()
        self.shard.clear_cache(pb.ClearCacheRequest())
        self.planner.reset()
        self.delivery.fail_all(GenerationFailed("a step failed"))

    def turn(self) -> bool:
        """What the scheduler's task does again and again. Whether there was anything to do."""
        sent = False
        while self.send() is not None:
            sent = True
        return self.receive() or sent

    def run(self, turns: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(turns):
            if not self.turn():
                assert not self.answers
                return
        raise AssertionError("the requests do not end")

    def check_tokens(self) -> None:
        """Every request that ended as it should has the tokens that it would have had alone."""
        for request, sink, stop_after in self.requests.values():
            expected = expected_tokens(request, stop_after=stop_after)
            if sink.reason is not None:
                assert sink.tokens == expected, f"request {request.id}"
                if request.prefill_logprobs:
                    assert sink.prefill_ids == request.input_ids
            else:
                assert sink.tokens == expected[: len(sink.tokens)], f"request {request.id}"

    def steps(self) -> list[pb.PrefillRequest | pb.DecodeRequest]:
        return [call.message for call in self.sent if not isinstance(call.message, pb.FilterBatchRequest)]

    def prefills(self) -> list[pb.PrefillRequest]:
        return [message for message in self.steps() if isinstance(message, pb.PrefillRequest)]
