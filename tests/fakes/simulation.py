"""The scheduler without a network: its calls are executed by a simulated shard at once, and answered later."""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from shared.stubs import generate_pb2 as pb
from tests.fakes.recording_sink import RecordingSink, recorded_request
from tests.fakes.simulated_disk import SimulatedDisk
from tests.fakes.simulated_shard import SimulatedShard, expected_tokens
from tgi_server.router.errors import GenerationFailed, InvalidRequest
from tgi_server.router.limits import Limits
from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.scheduling.pace import PromptPace
from tgi_server.router.scheduling.planner import FilterPlan, StepPlan
from tgi_server.router.scheduling.scheduler import Scheduler
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.shard_client import ShardedClient
from tgi_server.router.submission import PreparedRequest

T = TypeVar("T")

# Methods of memory, batch and queue that a simulation can break for one request.
BREAKABLE = ("admit", "grow", "computed", "release", "compute", "put_back")


def batch_limits(**limits: Any) -> Limits:
    """The limits that the scheduler works with, as given; the others are those of no test."""
    chosen: dict[str, Any] = {
        "max_batch_prefill_tokens": 64,
        "max_batch_total_tokens": 64,
        "max_batch_size": 8,
        "max_waiting_tokens": 4,
        "waiting_served_ratio": 0.3,
        **limits,
    }
    others = dict.fromkeys(set(Limits.__slots__) - chosen.keys(), 0)
    return Limits(**others, **chosen)


class FixedPace(PromptPace):
    """Lets as many prompt tokens ride along in every step, whatever steps take; without replies, all that may."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def observe(self, replies: int, prompt_tokens: int, seconds: float) -> None:
        pass

    def tokens_beside(self, replies: int, expected: int, *, images: bool = False) -> int:
        return self._tokens

    def tokens_alone(self) -> int:
        return 2**31

    def is_short(self, prompt_tokens: int) -> bool:
        return True


class Fault(Exception):
    """Raised where a test wants the scheduling of one request to break."""


class _Pending:
    """A call that has been executed, and whose response is taken when the test wants it."""

    def __init__(self, response: pb.Answer, on_taken: Callable[[], None]) -> None:
        self._response = response
        self._on_taken = on_taken

    async def response(self) -> pb.Answer:
        self._on_taken()
        return self._response

    def cancel(self) -> None:
        pass


class _InProcess:
    """Stands for `ShardedClient`, in front of one shard in this process.

    The shard runs calls in the order in which they were sent, so it makes no difference when it runs them.
    """

    def __init__(self, shard: SimulatedShard, disk: SimulatedDisk | None) -> None:
        self.shard = shard
        self.calls: deque[pb.Call] = deque()
        if disk is not None:
            self.store_file, self.load_file = disk.store_file, disk.load_file

    def send(self, call: pb.Call, timeout_s: float | None = None) -> _Pending:
        self.calls.append(call)
        kind = call.WhichOneof("call")
        result = getattr(self.shard, kind)(getattr(call, kind))
        if isinstance(result, pb.StepResponse):
            return _Pending(pb.Answer(step=result), lambda: self.shard.collected(result))
        return _Pending(pb.Answer(**{kind: result}), lambda: None)


class AdapterShards:
    """Stands for the part of `ShardedClient` that loads adapters, which takes as long as `loading` is cleared.

    held: keys, in the order in which they came. broken: folders that cannot be read.
    """

    def __init__(self) -> None:
        self.held: list[str] = []
        self.broken: set[str] = set()
        self.loading = asyncio.Event()
        self.loading.set()

    async def load_adapter(self, key: str, folder: str, *, check_only: bool = False) -> pb.LoadAdapterResponse:
        if not self.loading.is_set():
            await self.loading.wait()
        if folder in self.broken:
            raise InvalidRequest(f"{folder} has no adapter_config.json")
        if not check_only:
            self.held.append(key)
        return pb.LoadAdapterResponse(rank=4, bytes=100)

    async def unload_adapter(self, key: str) -> None:
        if key in self.held:
            self.held.remove(key)


def _ready_adapters() -> Adapters:
    adapters = Adapters(cast(ShardedClient, AdapterShards()), max_loras=2)
    for name in ("a", "b"):
        try:
            adapters.add(name, "").send(None)
        except StopIteration:
            adapters.find(name).digest = name
            continue
        raise AssertionError("nothing is waited for")
    return adapters


class Simulation:
    """A scheduler that a test drives by hand, call by call.

    seconds: its clock, which goes on when a response is taken, by what `step_seconds` says of a step's replies and
    prompt tokens.
    """

    _metrics = Metrics()

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        *,
        paged: bool = True,
        late_end: bool = False,
        prefill_chunk_tokens: int = 16,
        pace: PromptPace | None = None,
        step_seconds: Callable[[int, int], float] = lambda replies, prompt_tokens: 1.0,
        max_batch_size: int = 8,
        speculate: int = 0,
        num_snapshots: int = 0,
        adapters: Adapters | None = None,
        fair: bool = False,
        admission: bool = True,
        disk: tuple[Path, int] | None = None,
        **limits: Any,
    ) -> None:
        """prefill_chunk_tokens: that ride along, unless there is a `pace`. adapters: None: `a` and `b`, both ready.

        disk: a folder for cached prefixes, and the bytes that they may take; it needs `close` in the end.
        """
        self.seconds = 0.0
        self._step_seconds = step_seconds
        self.shard = SimulatedShard(
            num_blocks,
            block_size,
            max_batch_size,
            paged=paged,
            late_end=late_end,
            speculate=speculate,
            num_snapshots=num_snapshots,
        )
        self.disk = None if disk is None else SimulatedDisk(self.shard, *disk, clock=lambda: self.seconds)
        self._shards = _InProcess(self.shard, self.disk)
        total = num_blocks * block_size
        self.scheduler = self._do(
            lambda: Scheduler(
                cast(ShardedClient, self._shards),
                pb.InfoResponse(paged=paged, block_size=block_size, speculate=speculate, states=num_snapshots > 0),
                pb.WarmupResponse(
                    num_blocks=num_blocks,
                    max_total_tokens=total,
                    max_batch_total_tokens=total,
                    num_snapshots=num_snapshots,
                ),
                batch_limits(max_batch_total_tokens=total, max_batch_size=max_batch_size, **limits),
                self._metrics,
                pace or FixedPace(prefill_chunk_tokens),
                adapters=_ready_adapters() if adapters is None else adapters,
                disk=None if self.disk is None else self.disk.prefixes,
                fair=fair,
                admission=admission,
                clock=lambda: self.seconds,
            )
        )
        self.waiting, self.batch = self.scheduler.waiting, self.scheduler.batch
        self.memory = self.batch.memory
        self._unanswered: deque[StepPlan | FilterPlan] = deque()
        self.sent: list[StepPlan | FilterPlan] = []
        self.requests: dict[int, tuple[PreparedRequest, RecordingSink, int | None]] = {}
        self._faults: dict[int, tuple[str, bool]] = {}
        for part in (self.memory, self.batch, self.waiting):
            for method in BREAKABLE:
                if hasattr(part, method):
                    setattr(part, method, self._breakable(method, getattr(part, method)))

    def submit(
        self, input_ids: list[int], max_new_tokens: int = 8, *, stop_after: int | None = None, **parameters: object
    ) -> RecordingSink:
        request, sink = recorded_request(
            len(self.requests) + 1, input_ids, max_new_tokens, stop_after=stop_after, **parameters
        )
        self.requests[request.id] = (request, sink, stop_after)
        self._do(lambda: self.scheduler.submit(request, sink))
        assert not isinstance(sink.error, InvalidRequest), f"the test asks for too much: {sink.error}"
        return sink

    def break_scheduling(self, request_id: int, method: str, *, done: bool) -> None:
        """From now on `method` raises for the request: after it has done its work if `done`, else before it begins."""
        self._faults[request_id] = (method, done)

    def cancel(self, request_id: int) -> str:
        return self._do(lambda: self.scheduler.cancel(request_id))

    def forget(self, namespace: str) -> None:
        """Begins to forget what is cached under a namespace."""
        assert self.disk is not None
        self.disk.start(self.scheduler.forget(namespace))

    def send(self) -> list[FilterPlan | StepPlan]:
        """Sends the next call, if there is one. Returns what was sent."""
        plans = self._do(self.scheduler.send)
        self.sent += plans
        self._unanswered += plans
        return plans

    def receive(self) -> bool:
        """Delivers the oldest response. Returns False if none is due."""
        if not self._unanswered:
            return False
        plan = self._unanswered.popleft()
        if isinstance(plan, StepPlan):
            self.seconds += self._step_seconds(plan.replies, plan.prompt_tokens)
        self._do(self._receive)
        return True

    def _receive(self) -> None:
        try:
            self.scheduler.receive().send(None)
        except StopIteration:
            return
        raise AssertionError("a response that is there was waited for")

    def _do(self, work: Callable[[], T]) -> T:
        return work() if self.disk is None else self.disk.within(work)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    def fail(self) -> None:
        """A step fails: the shard loses its batch."""
        self._unanswered.clear()
        self.shard.clear_cache(pb.ClearCacheRequest())
        self._do(lambda: self.scheduler.fail_running(GenerationFailed("a step failed")))

    def turn(self) -> bool:
        """Does once what the scheduler's task does again and again. Returns False if there was nothing to do."""
        sent = False
        while self.send():
            sent = True
        return self.receive() or sent

    def run(self, turns: int = 10_000) -> None:
        """Goes on until nothing is left to do."""
        for _ in range(turns):
            if not self.turn():
                assert not self._unanswered
                if self.disk is None or not self.disk.transfers:
                    return
                self.disk.finish(0, well=True)
        raise AssertionError("the requests do not end")

    def check_tokens(self) -> None:
        """Every request that ended as it should has the tokens that it would have had alone."""
        for request, sink, stop_after in self.requests.values():
            expected = expected_tokens(request, stop_after=stop_after)
            if sink.reason is not None:
                assert sink.tokens == expected, f"request {request.id}"
                if request.options.report.prefill_logprobs:
                    assert sink.prefill_ids == request.input_ids
            else:
                assert sink.tokens == expected[: len(sink.tokens)], f"request {request.id}"

    def steps(self) -> list[pb.PrefillRequest | pb.DecodeRequest]:
        """Returns the messages of all steps that were sent."""
        return [
            getattr(call, call.WhichOneof("call")) for call in self._shards.calls if not call.HasField("filter_batch")
        ]

    def prefills(self) -> list[pb.PrefillRequest]:
        return [message for message in self.steps() if isinstance(message, pb.PrefillRequest)]

    def _breakable(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(sequence: Sequence, *arguments: Any, **named: Any) -> Any:
            fault, done = self._faults.get(sequence.id, ("", False))
            if fault == name and not done:
                raise Fault(name)
            result = method(sequence, *arguments, **named)
            if fault == name:
                raise Fault(name)
            return result

        return call
