"""Sleep of a model: its shards free the memory of weights and KV cache until the model is needed again.

A model falls asleep when its running requests have ended; new ones wait. Cached prefixes are lost, except on disk.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sized
from contextlib import asynccontextmanager
from enum import Enum
from math import ceil
from time import perf_counter

from tgi_server.router.errors import CannotBeInTime, RouterError
from tgi_server.router.metrics import SleepMetrics
from tgi_server.router.scheduling import calls
from tgi_server.router.scheduling.batch import Batch, WaitingQueue
from tgi_server.router.scheduling.prefix_disk import PrefixDisk
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.shard_client import ShardedClient

logger = logging.getLogger(__name__)

# Seconds between two checks for running requests and files that are being written.
_LOOK_EVERY_S = 0.01


class SleepState(Enum):
    """AWAKE: requests are computed. FALLING: running ones are computed, new ones wait. ASLEEP, WAKING: all wait."""

    AWAKE = "awake"
    FALLING = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class SleepMode:
    """Puts the shards to sleep and wakes them.

    state: the current state. on_wanted: called if a request needs the model while it is not awake, and again if one
    still waits when it has fallen asleep; by default it wakes the model. log: writes a log line about the model, such
    as "woke in 0.5 s". wake_s: seconds that waking took last; 0 before the first time.
    """

    def __init__(
        self,
        shards: ShardedClient,
        waiting: WaitingQueue,
        batch: Batch,
        in_flight: Sized,
        disk: PrefixDisk | None,
        on_awake: Callable[[], None],
        on_failure: Callable[[RouterError], None],
        metrics: SleepMetrics,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """in_flight: calls that the shards have not answered. on_awake: called when requests can be computed again.

        on_failure: called with the error if the model cannot wake, to fail the waiting requests. clock: in seconds.
        """
        self.state = SleepState.AWAKE
        self.on_wanted: Callable[[], None] = self.wake_soon
        self.log: Callable[[str], None] = lambda done: logger.info("the model %s", done)
        self.wake_s = 0.0
        self._shards = shards
        self._waiting = waiting
        self._batch = batch
        self._in_flight = in_flight
        self._disk = disk
        self._on_awake = on_awake
        self._on_failure = on_failure
        self._metrics = metrics
        self._clock = clock
        self._began = 0.0  # when the shards began to wake
        self._users = 0  # calls beside the steps
        self._waiters: list[asyncio.Future[None]] = []  # for such a call
        self._change: asyncio.Task[int] | None = None
        self._soon: asyncio.Task[None] | None = None
        shards.in_use = self._in_use

    @property
    def awake(self) -> bool:
        """True while requests can be computed."""
        return self.state is SleepState.AWAKE

    @property
    def holds(self) -> bool:
        """True while requests may have to wait for the model to wake, or for the disk."""
        return not self.awake or (self._disk is not None and self._disk.busy)

    @property
    def wanted(self) -> bool:
        """True while requests wait for the model to wake."""
        return not self.awake and bool(self._waiters or len(self._waiting))

    def seconds_until_awake(self) -> float:
        """Returns an estimate by the last time that waking took; 0 before the first time."""
        if self.awake:
            return 0.0
        return max(0.0, self.wake_s - (self._clock() - self._began if self.state is SleepState.WAKING else 0.0))

    def check_time(self, sequence: Sequence) -> None:
        """Raises CannotBeInTime for a request whose deadline passes before the model is awake."""
        late = self._clock() + self.seconds_until_awake() - min(sequence.deadline, sequence.request.first_token_by)
        if late > 0 and not self.awake:
            raise CannotBeInTime(
                f"the model is {self.state.value}, and would be awake {late:.1f} s after the deadline of the request; "
                "allow it more time",
                retry_after=max(1, ceil(late)),
            )

    def queued(self) -> None:
        """Reports that a request has joined the queue."""
        if not self.awake:
            self.on_wanted()

    def wake_soon(self) -> None:
        """Wakes the model in the background. If it is falling asleep, that ends first."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().create_task(self._wake_soon(), name="wake")

    async def sleep(self, *, grammars: bool = False) -> int:
        """Puts the model to sleep after its running requests. Returns the bytes of memory that the shards have freed.

        grammars: True if the tables for grammars are freed, too; they are loaded again, concurrently with requests,
        when the model wakes.

        A model that is waking wakes first. Returns 0 if it sleeps already. Raises CannotSleep and Unhealthy; then the
        model is awake.
        """
        while self.state is SleepState.WAKING:
            await self._changed()
        if self.state is SleepState.AWAKE:
            self.state = SleepState.FALLING
            self._change = asyncio.get_running_loop().create_task(self._fall_asleep(grammars), name="sleep")
        return await self._changed() if self.state is SleepState.FALLING else 0

    async def wake(self) -> None:
        """Wakes the model, and waits until it is awake. Raises Unhealthy; then the model still sleeps."""
        while self.state is SleepState.FALLING:
            try:
                await self._changed()
            except RouterError:  # for the caller of `sleep`
                continue
        if self.state is SleepState.ASLEEP:
            self.state = SleepState.WAKING
            self._change = asyncio.get_running_loop().create_task(self._wake(), name="wake")
        if self.state is SleepState.WAKING:
            await self._changed()

    def close(self) -> None:
        """Cancels sleeping, waking, and waiting for the model."""
        for task in (self._soon, self._change):
            if task is not None:
                task.cancel()
        for waiter in self._waiters:
            waiter.cancel()

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[None]:
        """Waits until the model is awake, and keeps it awake. Raises Unhealthy if it cannot wake."""
        while not self.awake:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                self.on_wanted()
                await waiter
            finally:
                self._waiters.remove(waiter)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    async def _changed(self) -> int:
        """Waits for the current change of state, which continues if the caller is cancelled."""
        assert self._change is not None
        return await asyncio.shield(self._change)

    async def _wake_soon(self) -> None:
        try:
            await self.wake()
        except RouterError as error:
            logger.error("the model cannot wake: %s", error)
        finally:
            self._soon = None

    async def _fall_asleep(self, grammars: bool) -> int:
        try:
            while self._busy:  # noqa: ASYNC110 - nothing reports the end of all of them
                await asyncio.sleep(_LOOK_EVERY_S)
            began = self._clock()
            if self._batch.step > 1:  # shards may hold sequences that have ended
                await self._shards.send(calls.clear_call()).response()
            released = await self._shards.sleep(grammars=grammars)
        except BaseException as error:
            await self._stay_awake(error)
            raise
        self._batch.reset()
        self.state = SleepState.ASLEEP
        seconds = self._clock() - began
        self._metrics.slept(seconds, released)
        self.log(f"sleeps: {released >> 20} MB of memory released in {seconds:.2f} s")
        if self.wanted:
            self.on_wanted()
        return released

    @property
    def _busy(self) -> bool:
        """True while requests that have begun are not complete, other calls use the model, or files are in use."""
        started = any(sequence.started for sequence in self._waiting)  # preempted ones
        disk = self._disk is not None and self._disk.busy
        return bool(len(self._in_flight) or len(self._batch) or self._users or started or disk)

    async def _stay_awake(self, error: BaseException) -> None:
        """Wakes the shards that may sleep already, after one of them failed to."""
        self.state = SleepState.AWAKE
        if isinstance(error, RouterError):
            try:
                await self._shards.wake()
            except RouterError:  # they have ended; the next step reports that
                logger.error("the shards do not answer: %s", error)
        self._let_go(None)

    async def _wake(self) -> int:
        self._began = self._clock()
        try:
            await self._shards.wake()
        except BaseException as error:
            self.state = SleepState.ASLEEP
            if isinstance(error, RouterError):
                self._let_go(error)
                self._on_failure(error)
            raise
        self.wake_s = self._clock() - self._began
        self.state = SleepState.AWAKE
        self._metrics.woke(self.wake_s)
        self.log(f"woke in {self.wake_s:.2f} s")
        self._let_go(None)
        return 0

    def _let_go(self, error: RouterError | None) -> None:
        """Lets waiting calls and requests continue; with an error, fails the calls."""
        for waiter in self._waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
        self._on_awake()
