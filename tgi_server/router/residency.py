"""Decides which of several models are in memory, and when: pure rules over events and times, without I/O.

A model whose requests wait is woken when there is memory for it. Otherwise others sleep for it: those without requests
first, of these the ones with the largest `priority`, of these the one idle for longest. A busy model gives way once it
had its turn, or at once to a model with a smaller `priority`: its new requests wait, the running ones finish.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf

from tgi_server.router.errors import CannotBeInTime, ModelNotReady, RequestTimedOut, RouterError

# A model that has been woken stays awake for at least so many times as long as waking took.
_AWAKE_RATIO = 2.0
# Seconds for which a busy model may go on while others wait for its memory, and times as long as waking took.
_TURN_SECONDS, _TURN_RATIO = 8.0, 8.0
# Seconds until a model that failed is tried again: the first time, and at most.
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 5.0, 300.0


class State(Enum):
    """Where a model is. ABSENT: it has not been loaded yet, or its shards have ended."""

    ABSENT = "absent"
    LOADING = "loading"
    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"


_IN_MEMORY = frozenset({State.LOADING, State.WAKING, State.AWAKE, State.FALLING_ASLEEP})


@dataclass(slots=True)
class Resident:
    """One model, as the rules see it. Times are in seconds of the caller's clock.

    bytes: of weights and KV cache while it is awake. preload: it is loaded as soon as there is memory, without a
    request. can_sleep: False for a model whose shards have no way to. waiting: the deadline of each waiting request,
    by id. running: ids. dismissed: it is to sleep once nothing runs, though nobody needs its memory. yields: its new
    requests wait, because it is dismissed, or another model is to have its memory. used_at: when its last request
    ended. awake_at: since when it is awake. load_seconds, wake_seconds, sleep_seconds: how long it took last; 0: not
    known yet. failures: in a row. reason: of the last one. retry_at: not before.
    """

    name: str
    bytes: int
    pinned: bool = False
    idle_seconds: float | None = None
    priority: int = 0
    preload: bool = False
    can_sleep: bool = True
    state: State = State.ABSENT
    waiting: dict[int, float] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    dismissed: bool = False
    yields: bool = False
    used_at: float = 0.0
    awake_at: float = 0.0
    began_at: float = 0.0
    load_seconds: float = 0.0
    wake_seconds: float = 0.0
    sleep_seconds: float = 0.0
    failures: int = 0
    reason: str = ""
    retry_at: float = -inf

    @property
    def failed(self) -> bool:
        """Returns True if the model could not be loaded or woken, or was lost, and has not been tried again since."""
        return self.failures > 0 and self.state in (State.ABSENT, State.ASLEEP)

    @property
    def seconds_to_wake(self) -> float:
        """Returns how long it took to load or wake it, whichever it needs."""
        return self.load_seconds if self.state in (State.ABSENT, State.LOADING) else self.wake_seconds

    @property
    def _turn(self) -> float:
        return max(_TURN_SECONDS, _TURN_RATIO * self.wake_seconds)

    def free_at(self, waker: "Resident") -> float:
        """Returns when the model, which is awake, may give way to another one; inf: never."""
        if self.pinned or not self.can_sleep:
            return inf
        rested = self.awake_at + _AWAKE_RATIO * self.wake_seconds
        if (self.running or self.waiting) and waker.priority >= self.priority:
            return max(rested, self.awake_at + self._turn)
        return rested


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The model's shards are to be started."""

    model: Resident


@dataclass(frozen=True, slots=True)
class WakeModel:
    """The model is to be woken."""

    model: Resident


@dataclass(frozen=True, slots=True)
class SleepModel:
    """The model, for which nothing runs, is to be put to sleep. reason: for the log."""

    model: Resident
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """A waiting request is to begin."""

    request: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """A waiting request is to fail."""

    request: int
    error: RouterError


Action = LoadModel | WakeModel | SleepModel | Admit | Refuse


class Residency:
    """The models of a server and the memory that they share.

    Events are reported by methods; after each of them, and at `next_time`, `decide` says what is to be done.
    """

    def __init__(self, models: Sequence[Resident], most_bytes: int | None) -> None:
        """most_bytes: of all models in memory; None: no limit."""
        self.models = models
        self._most = inf if most_bytes is None else most_bytes
        self._since: dict[int, float] = {}  # when each waiting request came

    @property
    def held(self) -> int:
        """Returns the bytes of all models that are in memory, on their way to it, or out of it."""
        return sum(model.bytes for model in self.models if model.state in _IN_MEMORY)

    def ask(self, model: Resident, request: int, now: float, deadline: float = inf) -> None:
        """Reports that a request has come. deadline: the time after which its answer is useless."""
        model.waiting[request] = deadline
        self._since[request] = now

    def leave(self, model: Resident, request: int, now: float) -> None:
        """Reports that a request has ended, or does not wait any more."""
        self._since.pop(request, None)
        model.waiting.pop(request, None)
        if request in model.running:
            model.running.remove(request)
            model.used_at = now

    def loaded(self, model: Resident, now: float) -> None:
        """Reports that the model is in memory for the first time, or again after its shards had ended."""
        model.load_seconds = now - model.began_at
        self._awake(model, now)

    def woken(self, model: Resident, now: float) -> None:
        """Reports that the model is awake."""
        model.wake_seconds = now - model.began_at
        self._awake(model, now)

    def slept(self, model: Resident, now: float, released: int = 0) -> None:
        """Reports that the model has given its memory back. released: bytes, which may be more than was estimated."""
        model.bytes = int(min(max(model.bytes, released), self._most))
        model.sleep_seconds = now - model.began_at
        model.state, model.dismissed = State.ASLEEP, False

    def stayed_awake(self, model: Resident) -> None:
        """Reports that the model could not be put to sleep, and will not be."""
        model.state, model.can_sleep, model.dismissed = State.AWAKE, False, False

    def failed(self, model: Resident, now: float, reason: str, *, lost: bool = True) -> None:
        """Reports that the model could not be loaded or woken, or that its shards have ended.

        lost: its shards have ended; False: it still sleeps.
        """
        model.state = State.ABSENT if lost else State.ASLEEP
        model.failures += 1
        model.reason = reason
        model.retry_at = now + min(_RETRY_SECONDS * 2.0 ** (model.failures - 1), _MOST_RETRY_SECONDS)
        model.preload = False
        model.running.clear()

    def _awake(self, model: Resident, now: float) -> None:
        model.state = State.AWAKE
        model.failures, model.reason = 0, ""
        model.awake_at = model.used_at = now

    def decide(self, now: float) -> list[Action]:
        """Returns what is to be done now, in this order. The states of the models show it as begun."""
        refusals, changes = list(self._refusals(now)), list(self._make_room(now))
        return [*refusals, *self._admissions(), *changes, *self._idle_ones(now), *self._preloads(now)]

    def next_time(self, now: float) -> float:
        """Returns when `decide` is to be called again, if nothing is reported before; inf: not at all."""
        times = [inf]
        for model in self.models:
            for deadline in model.waiting.values():
                times += [deadline, deadline - model.seconds_to_wake]
            if model.state is State.AWAKE:
                times += [model.free_at(waker) for waker in self._wakers(now)]
                if model.idle_seconds is not None and not model.running:
                    times.append(model.used_at + model.idle_seconds)
        return min((time for time in times if time > now), default=inf)

    def _wakers(self, now: float) -> list[Resident]:
        """Returns the models that are to be loaded or woken for waiting requests, the one that waits longest first."""
        wanted = [
            model
            for model in self.models
            if model.waiting and model.state in (State.ABSENT, State.ASLEEP) and model.retry_at <= now
        ]
        return sorted(wanted, key=lambda model: min(self._since[each] for each in model.waiting))

    def _make_room(self, now: float) -> Iterator[Action]:
        """Begins what fits, in the order of the waiting, and has others give way for what does not."""
        for model in self.models:
            model.yields = model.dismissed
        free = self._most - self.held
        coming = float(sum(model.bytes for model in self.models if model.state is State.FALLING_ASLEEP))
        chosen: set[str] = set()
        for waker in self._wakers(now):
            if waker.bytes <= free:
                free -= waker.bytes
                if waker.state is State.ASLEEP or self._loads_next:
                    yield self._begin(waker, now)
                continue
            victims = self._victims(waker, waker.bytes - free - coming, chosen, now)
            if victims is None:
                continue
            for victim in victims:
                chosen.add(victim.name)
                coming += victim.bytes
                if victim.free_at(waker) > now:
                    continue
                if victim.running:
                    victim.yields = True
                else:
                    yield self._put_to_sleep(victim, now, f"{waker.name} needs its memory")
            # Those that have waited for less time may have what this one leaves.
            left = free + coming - waker.bytes
            free = min(free, left)
            coming = left - free

    def _victims(self, waker: Resident, missing: float, chosen: set[str], now: float) -> list[Resident] | None:
        """Returns the models that are to make room for another one; None if they could not."""
        candidates = [
            model
            for model in self.models
            if model.state is State.AWAKE and model.name not in chosen and model.free_at(waker) < inf
        ]
        # Those that have waiting requests are awake, and yield: they are busy, too.
        candidates.sort(
            key=lambda each: (
                bool(each.running or each.waiting),
                -each.priority,
                max(each.free_at(waker), now),
                each.used_at,
            )
        )
        victims: list[Resident] = []
        for candidate in candidates:
            if missing <= 0:
                break
            victims.append(candidate)
            missing -= candidate.bytes
        if missing > 0:
            return None
        for victim in list(victims):  # the last ones may be enough
            if victim.bytes <= -missing:
                victims.remove(victim)
                missing += victim.bytes
        return victims

    @property
    def _loads_next(self) -> bool:
        """Returns True if no model is being loaded: they are loaded one after the other."""
        return all(model.state is not State.LOADING for model in self.models)

    def _begin(self, model: Resident, now: float) -> LoadModel | WakeModel:
        model.began_at = now
        if model.state is State.ABSENT:
            model.state = State.LOADING
            return LoadModel(model)
        model.state = State.WAKING
        return WakeModel(model)

    def _put_to_sleep(self, model: Resident, now: float, reason: str) -> SleepModel:
        model.state, model.began_at = State.FALLING_ASLEEP, now
        return SleepModel(model, reason)

    def _admissions(self) -> Iterator[Admit]:
        for model in self.models:
            if model.state is State.AWAKE and not model.yields:
                for request in list(model.waiting):
                    del model.waiting[request]
                    self._since.pop(request, None)
                    model.running.add(request)
                    yield Admit(request)

    def _refusals(self, now: float) -> Iterator[Refuse]:
        for model in self.models:
            if not model.waiting:
                continue
            seconds = self.seconds_until_awake(model, now)
            for request, deadline in list(model.waiting.items()):
                error = self._fault(model, deadline, seconds, now)
                if error is not None:
                    del model.waiting[request]
                    self._since.pop(request, None)
                    yield Refuse(request, error)

    def _fault(self, model: Resident, deadline: float, seconds: float, now: float) -> RouterError | None:
        if model.failed and model.retry_at > now:
            return ModelNotReady(
                f"the model {model.name!r} is not available: {model.reason}", ceil(model.retry_at - now)
            )
        if seconds == inf:
            return ModelNotReady(
                f"the model {model.name!r} needs {model.bytes >> 20} MiB, and the models that are awake and cannot "
                "sleep leave less (--models-memory)",
                ceil(_MOST_RETRY_SECONDS),
            )
        if deadline <= now:
            return RequestTimedOut(f"the deadline of the request passed before the model {model.name!r} was awake")
        if now + seconds > deadline:
            return CannotBeInTime(
                f"the model {model.name!r} sleeps, and will be awake {now + seconds - deadline:.1f} s after the "
                "request's deadline; allow it more time, or try again later",
                max(1, ceil(seconds)),
            )
        return None

    def seconds_until_awake(self, model: Resident, now: float) -> float:
        """Returns how long it takes at least until the model is awake, as far as that is known; inf: never."""
        if model.state is State.AWAKE:
            return 0.0
        if model.state in (State.LOADING, State.WAKING):
            return max(0.0, model.began_at + model.seconds_to_wake - now)
        seconds = model.seconds_to_wake
        others = [each for each in self.models if each is not model and each.state in _IN_MEMORY]
        missing = model.bytes + sum(each.bytes for each in others) - self._most
        leaves = {
            each.name: (each.free_at(model) - now if each.state is State.AWAKE else 0.0, each.sleep_seconds)
            for each in others
            if not each.pinned and each.can_sleep
        }
        for each in sorted((each for each in others if each.name in leaves), key=lambda each: leaves[each.name]):
            if missing <= 0:
                break
            missing -= each.bytes
            rest, sleep = leaves[each.name]
            seconds = max(seconds, model.seconds_to_wake + max(rest, 0.0) + sleep)
        return inf if missing > 0 else seconds

    def _idle_ones(self, now: float) -> Iterator[SleepModel]:
        for model in self.models:
            if model.state is State.AWAKE and model.dismissed and not model.running:
                yield self._put_to_sleep(model, now, "as requested")
            elif (
                model.state is State.AWAKE
                and model.idle_seconds is not None
                and not (model.running or model.waiting or model.pinned)
                and model.can_sleep
                and model.used_at + model.idle_seconds <= now
            ):
                yield self._put_to_sleep(model, now, f"idle for {model.idle_seconds:g} s")

    def _preloads(self, now: float) -> Iterator[LoadModel | WakeModel]:
        """Loads a model without requests, if it fits beside all others and nobody waits for memory."""
        if self._wakers(now) or not self._loads_next:
            return
        for model in self.models:
            if model.preload and model.state is State.ABSENT:
                model.preload = False
                if model.bytes <= self._most - self.held:
                    yield self._begin(model, now)
                    return
