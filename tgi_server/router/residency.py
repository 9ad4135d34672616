"""Decides which of several models are in memory: rules over events and times, without I/O.

A model with waiting requests is woken as soon as there is memory for it. If there is not, other models are put to
sleep: first models without requests, by the largest `priority`, then the longest idle time. Busy models follow, after
their turn: their running requests finish, and new ones wait. A smaller `priority` of the waiting model ends a turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf

from tgi_server.router.errors import CannotBeInTime, ModelNotReady, RequestTimedOut, RouterError

# Minimum time awake, as a multiple of the time that waking took.
_AWAKE_RATIO = 2.0
# The turn of a busy model while others wait for its memory: seconds, and a multiple of the time that waking took.
_TURN_SECONDS, _TURN_RATIO = 8.0, 8.0
# Back-off of a model that failed, in seconds: the first one, and the maximum.
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 5.0, 300.0


class State(Enum):
    """The state of a model. ABSENT: it has not been loaded yet, or its shards have ended."""

    ABSENT = "absent"
    LOADING = "loading"
    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"


_IN_MEMORY = frozenset({State.LOADING, State.WAKING, State.AWAKE, State.FALLING_ASLEEP})


@dataclass(slots=True)
class Resident:
    """One model and its requests. Times are in seconds of the caller's clock.

    bytes: size of weights and KV cache while the model is awake. preload: True if the model is loaded without a request
    as soon as there is memory. can_sleep: False for models that cannot sleep. waiting: deadlines of the waiting
    requests, by id. running: ids of the running requests. dismissed: True if a client has put the model to sleep, until
    its running requests have ended. yields: True while new requests wait, because the model is dismissed, or gives way
    to another one. used_at: time at which the last request ended. awake_at, began_at: start of the time awake, and of
    the last change of state. load_seconds, wake_seconds, sleep_seconds: last durations; 0: not known yet. failures:
    number of consecutive failures. reason: message of the last failure. retry_at: earliest time of the next attempt.
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
        """Returns True after a failure, until the next attempt to load or wake the model."""
        return self.failures > 0 and self.state in (State.ABSENT, State.ASLEEP)

    @property
    def seconds_to_wake(self) -> float:
        """Returns the seconds that loading or waking took last, whichever the model needs now."""
        return self.load_seconds if self.state in (State.ABSENT, State.LOADING) else self.wake_seconds

    @property
    def _turn(self) -> float:
        return max(_TURN_SECONDS, _TURN_RATIO * self.wake_seconds)

    def free_at(self, waker: "Resident") -> float:
        """Returns the time from which the model, which is awake, gives way to another one; inf: never."""
        if self.pinned or not self.can_sleep:
            return inf
        rested = self.awake_at + _AWAKE_RATIO * self.wake_seconds
        if (self.running or self.waiting) and waker.priority >= self.priority:
            return max(rested, self.awake_at + self._turn)
        return rested


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Start the shards of the model."""

    model: Resident


@dataclass(frozen=True, slots=True)
class WakeModel:
    """Wake the model."""

    model: Resident


@dataclass(frozen=True, slots=True)
class SleepModel:
    """Put the model, which has no running requests, to sleep. reason: text for the log."""

    model: Resident
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Start a waiting request."""

    request: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail a waiting request."""

    request: int
    error: RouterError


Action = LoadModel | WakeModel | SleepModel | Admit | Refuse


class Residency:
    """The models of a server and the memory that they share.

    Events are reported by methods. The caller executes the actions that `decide` returns after an event, and at
    `next_time`.
    """

    def __init__(self, models: Sequence[Resident], most_bytes: int | None) -> None:
        """most_bytes: limit for the bytes of all models in memory; None: no limit."""
        self.models = models
        self._most = inf if most_bytes is None else most_bytes
        self._since: dict[int, float] = {}  # when each waiting request came

    @property
    def held(self) -> int:
        """Returns the bytes of all models that are awake, or are being loaded, woken or put to sleep."""
        return sum(model.bytes for model in self.models if model.state in _IN_MEMORY)

    def ask(self, model: Resident, request: int, now: float, deadline: float = inf) -> None:
        """Reports a new request. deadline: time after which its answer is useless."""
        model.waiting[request] = deadline
        self._since[request] = now

    def leave(self, model: Resident, request: int, now: float) -> None:
        """Reports that a request has ended, or was cancelled while it waited."""
        self._since.pop(request, None)
        model.waiting.pop(request, None)
        if request in model.running:
            model.running.remove(request)
            model.used_at = now

    def loaded(self, model: Resident, now: float) -> None:
        """Reports that the shards of the model have loaded it."""
        model.load_seconds = now - model.began_at
        self._awake(model, now)

    def woken(self, model: Resident, now: float) -> None:
        """Reports that the model is awake."""
        model.wake_seconds = now - model.began_at
        self._awake(model, now)

    def slept(self, model: Resident, now: float, released: int = 0) -> None:
        """Reports that the model sleeps. released: freed bytes; `bytes` is raised to that number."""
        model.bytes = int(min(max(model.bytes, released), self._most))
        model.sleep_seconds = now - model.began_at
        model.state, model.dismissed = State.ASLEEP, False

    def stayed_awake(self, model: Resident) -> None:
        """Reports that the model could not be put to sleep; this is not tried again."""
        model.state, model.can_sleep, model.dismissed = State.AWAKE, False, False

    def failed(self, model: Resident, now: float, reason: str, *, lost: bool = True) -> None:
        """Reports that the model could not be loaded or woken, or that its shards have ended.

        lost: True if the shards have ended, False if the model still sleeps.
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
        """Returns the actions to execute now, in order. The states of the models already include them."""
        refusals, changes = list(self._refusals(now)), list(self._make_room(now))
        return [*refusals, *self._admissions(), *changes, *self._idle_ones(now), *self._preloads(now)]

    def next_time(self, now: float) -> float:
        """Returns the next time at which `decide` must be called although no event is reported; inf: none."""
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
        """Returns the models to load or wake for waiting requests, in the order of their oldest request."""
        wanted = [
            model
            for model in self.models
            if model.waiting and model.state in (State.ABSENT, State.ASLEEP) and model.retry_at <= now
        ]
        return sorted(wanted, key=lambda model: min(self._since[each] for each in model.waiting))

    def _make_room(self, now: float) -> Iterator[Action]:
        """Loads or wakes the models that fit, in the order of their oldest request. For others, victims give way."""
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
            # Models whose requests are newer may use the memory that is left.
            left = free + coming - waker.bytes
            free = min(free, left)
            coming = left - free

    def _victims(self, waker: Resident, missing: float, chosen: set[str], now: float) -> list[Resident] | None:
        """Returns the models whose memory another one gets; None if that is not enough."""
        candidates = [
            model
            for model in self.models
            if model.state is State.AWAKE and model.name not in chosen and model.free_at(waker) < inf
        ]
        # A model that is awake and yields may have waiting requests only: it is busy, too.
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
        for victim in list(victims):  # the last victims may be enough
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
        """Returns a lower bound of the seconds until the model is awake, by measured times; inf: never."""
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
        """Loads the next model with `preload`, if it fits beside all others and no request waits for memory."""
        if self._wakers(now) or not self._loads_next:
            return
        for model in self.models:
            if model.preload and model.state is State.ABSENT:
                model.preload = False
                if model.bytes <= self._most - self.held:
                    yield self._begin(model, now)
                    return
