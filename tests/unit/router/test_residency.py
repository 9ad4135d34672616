"""Which models are in memory: rules by example, and two simulated hours of random requests."""

import heapq
import random
from dataclasses import dataclass, field
from math import inf

import pytest

from tgi_server.router.errors import CannotBeInTime, ModelNotReady, RequestTimedOut
from tgi_server.router.residency import Admit, LoadModel, Refuse, Residency, Resident, SleepModel, State, WakeModel

GB = 10**9


def awake(name: str, size: float = 1.0, **settings: object) -> Resident:
    return Resident(name, int(size * GB), state=State.AWAKE, **settings)  # type: ignore[arg-type]


def asleep(name: str, size: float = 1.0, **settings: object) -> Resident:
    return Resident(name, int(size * GB), state=State.ASLEEP, **settings)  # type: ignore[arg-type]


def kinds(actions: list[object]) -> list[str]:
    """The actions as text, such as `WakeModel a`."""
    subjects = [each.model.name if hasattr(each, "model") else each.request for each in actions]  # type: ignore[attr-defined]
    return [f"{type(each).__name__} {subject}" for each, subject in zip(actions, subjects, strict=True)]


def test_a_request_to_an_awake_model_begins_at_once():
    rules = Residency([model := awake("a")], GB)
    rules.ask(model, 1, now=0)
    assert kinds(rules.decide(0)) == ["Admit 1"]
    assert model.running == {1}


def test_a_request_wakes_its_model_if_there_is_memory():
    rules = Residency([awake("a"), model := asleep("b")], 2 * GB)
    rules.ask(model, 1, now=0)
    assert kinds(rules.decide(0)) == ["WakeModel b"]
    assert kinds(rules.decide(0.5)) == []
    rules.woken(model, 1)
    assert kinds(rules.decide(1)) == ["Admit 1"]
    assert model.wake_seconds == 1


def test_the_longest_idle_model_of_the_largest_priority_number_sleeps_first():
    models = [
        awake("pinned", pinned=True, used_at=1),
        awake("recent", used_at=9, priority=1),
        awake("idle", used_at=2, priority=1),
        awake("important", used_at=0),
        model := asleep("b"),
    ]
    rules = Residency(models, 4 * GB)
    rules.ask(model, 1, now=10)
    assert kinds(rules.decide(10)) == ["SleepModel idle"]
    rules.slept(models[2], 11)
    assert kinds(rules.decide(11)) == ["WakeModel b"]


def test_what_a_model_released_counts_where_it_is_more_than_was_estimated():
    models = [awake("a", 1), asleep("b", 1)]
    rules = Residency(models, 25 * GB // 10)
    models[0].state = State.FALLING_ASLEEP
    rules.slept(models[0], 1, 2 * GB)
    assert models[0].bytes == 2 * GB
    rules.slept(models[0], 2, 3 * GB)  # or it could never wake
    assert models[0].bytes == 25 * GB // 10
    rules.slept(models[1], 1, GB // 2)
    assert models[1].bytes == GB


def test_no_more_models_sleep_than_needed():
    rules = Residency(
        [awake("small", 0.2, used_at=1), awake("large", 2, used_at=2), model := asleep("b")], 22 * GB // 10
    )
    rules.ask(model, 1, now=10)
    assert kinds(rules.decide(10)) == ["SleepModel large"]


def test_a_busy_model_has_its_turn_then_finishes_what_runs():
    rules = Residency([busy := awake("a"), model := asleep("b")], GB)
    rules.ask(busy, 1, now=0)
    rules.decide(0)
    rules.ask(model, 2, now=1)
    rules.ask(busy, 3, now=2)
    assert kinds(rules.decide(2)) == ["Admit 3"]  # its turn is not over
    assert rules.next_time(2) == 8
    rules.decide(8)
    rules.ask(busy, 4, now=9)
    assert kinds(rules.decide(9)) == []
    rules.leave(busy, 1, 10)
    assert kinds(rules.decide(10)) == []
    rules.leave(busy, 3, 11)
    assert kinds(rules.decide(11)) == ["SleepModel a"]
    rules.slept(busy, 12)
    assert kinds(rules.decide(12)) == ["WakeModel b"]
    rules.woken(model, 13)
    assert kinds(rules.decide(13)) == ["Admit 2"]
    rules.leave(model, 2, 14)
    assert kinds(rules.decide(14)) == []  # woken a second ago
    assert kinds(rules.decide(15)) == ["SleepModel b"]
    rules.slept(model, 15)
    assert kinds(rules.decide(15)) == ["WakeModel a"]
    rules.woken(busy, 16)
    assert kinds(rules.decide(16)) == ["Admit 4"]


def test_a_busy_model_gives_way_at_once_to_a_more_important_one():
    rules = Residency([busy := awake("a"), model := asleep("b", priority=-1)], GB)
    rules.ask(busy, 1, now=0)
    rules.decide(0)
    rules.ask(model, 2, now=1)
    rules.ask(busy, 3, now=1)
    assert kinds(rules.decide(1)) == []
    rules.leave(busy, 1, 2)
    assert kinds(rules.decide(2)) == ["SleepModel a"]


def test_a_model_goes_on_if_who_waits_for_its_memory_leaves():
    rules = Residency([busy := awake("a"), model := asleep("b")], GB)
    rules.ask(busy, 1, now=0)
    rules.ask(model, 2, now=0)
    rules.decide(0)
    rules.decide(8)
    rules.ask(busy, 3, now=9)
    assert kinds(rules.decide(9)) == []
    rules.leave(model, 2, 9.5)
    assert kinds(rules.decide(9.5)) == ["Admit 3"]


def test_a_smaller_model_uses_memory_that_the_first_one_leaves():
    models = [busy := awake("a", 1), large := asleep("large", 1), small := asleep("small", 0.4)]
    rules = Residency(models, 15 * GB // 10)
    rules.ask(busy, 1, now=0)
    rules.decide(0)
    rules.ask(large, 2, now=1)
    rules.ask(small, 3, now=2)
    assert kinds(rules.decide(2)) == ["WakeModel small"]
    rules = Residency(models := [awake("a", 1), asleep("large", 1.4), asleep("small", 0.4)], 15 * GB // 10)
    rules.ask(models[0], 1, now=0)
    rules.decide(0)
    rules.ask(models[1], 2, now=1)
    rules.ask(models[2], 3, now=2)
    assert kinds(rules.decide(2)) == []  # the large one waits longer


def test_what_cannot_be_in_time_is_refused_at_once():
    rules = Residency([busy := awake("a", wake_seconds=1), model := asleep("b", wake_seconds=2)], GB)
    rules.ask(busy, 1, now=0)
    rules.decide(0)
    rules.ask(model, 2, now=0, deadline=1.5)
    rules.ask(model, 3, now=0, deadline=9)  # the other one has its turn
    rules.ask(model, 4, now=0, deadline=11)
    refused = [each for each in rules.decide(0) if isinstance(each, Refuse)]
    assert [(each.request, type(each.error)) for each in refused] == [(2, CannotBeInTime), (3, CannotBeInTime)]
    assert rules.next_time(0) == 8
    (late,) = rules.decide(9.5)
    assert isinstance(late, Refuse)
    assert isinstance(late.error, CannotBeInTime)


def test_a_deadline_that_passes_is_a_time_out():
    rules = Residency([model := asleep("b")], GB)
    rules.ask(model, 1, now=0, deadline=1)
    assert kinds(rules.decide(0)) == ["WakeModel b"]
    assert rules.next_time(0) == 1
    (late,) = rules.decide(1)
    assert isinstance(late, Refuse)
    assert isinstance(late.error, RequestTimedOut)


def test_a_model_that_failed_is_tried_again_later_and_later():
    rules = Residency([model := Resident("b", GB)], GB)
    now = 0.0
    for seconds in (5, 10, 20):
        rules.ask(model, 1, now)
        assert kinds(rules.decide(now)) == ["LoadModel b"]
        rules.failed(model, now, "no memory")
        (refused,) = rules.decide(now)
        assert isinstance(refused, Refuse)
        assert isinstance(refused.error, ModelNotReady)
        assert (str(refused.error), refused.error.retry_after) == ("the model 'b' is not available: no memory", seconds)
        now += seconds
    rules.ask(model, 1, now)
    rules.decide(now)
    rules.loaded(model, now + 1)
    assert kinds(rules.decide(now + 1)) == ["Admit 1"]
    assert not model.failed


def test_a_model_that_pinned_ones_leave_no_memory_is_refused():
    rules = Residency([awake("a", pinned=True), model := asleep("b")], GB)
    rules.ask(model, 1, 0)
    (refused,) = rules.decide(0)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, ModelNotReady)


def test_an_idle_model_sleeps_after_its_time():
    rules = Residency([awake("a", idle_seconds=60, used_at=5), awake("b")], None)
    assert rules.next_time(5) == 65
    assert kinds(rules.decide(64)) == []
    assert kinds(rules.decide(65)) == ["SleepModel a"]


def test_models_are_loaded_one_after_the_other_while_they_fit():
    models = [Resident(name, GB, preload=True) for name in "abc"]
    rules = Residency(models, 2 * GB)
    assert kinds(rules.decide(0)) == ["LoadModel a"]
    assert kinds(rules.decide(1)) == []
    rules.loaded(models[0], 2)
    assert kinds(rules.decide(2)) == ["LoadModel b"]
    rules.loaded(models[1], 3)
    assert kinds(rules.decide(3)) == []
    rules.ask(models[2], 1, 10)
    assert kinds(rules.decide(10)) == ["SleepModel a"]


@dataclass
class Simulation:
    """Two hours of requests, in simulated time. waits: seconds until each request began, by model."""

    random: random.Random
    rules: Residency
    wake_seconds: dict[str, float]
    now: float = 0.0
    events: list[tuple[float, int, str, object]] = field(default_factory=list)
    numbers: int = 0
    asked: dict[int, tuple[Resident, float, float]] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    switches: int = 0
    most_held: int = 0

    def at(self, time: float, kind: str, subject: object) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (time, self.numbers, kind, subject))

    def run(self) -> None:
        scheduled = inf
        while self.events:
            self.now, _, kind, subject = heapq.heappop(self.events)
            if kind == "ask":
                model, deadline = subject  # type: ignore[misc]
                request = len(self.asked)
                self.asked[request] = model, self.now, deadline
                self.rules.ask(model, request, self.now, self.now + deadline)
            elif kind == "end":
                request, model = subject  # type: ignore[misc]
                self.outcomes[request] = "done"
                self.rules.leave(model, request, self.now)
            elif kind != "time":
                getattr(self.rules, kind)(subject, self.now)
            for action in self.rules.decide(self.now):
                self.do(action)
            self.most_held = max(self.most_held, self.rules.held)
            following = self.rules.next_time(self.now)
            if following < inf and not (self.now < scheduled <= following):
                self.at(following, "time", None)
                scheduled = following

    def do(self, action: object) -> None:
        match action:
            case WakeModel(model):
                self.switches += 1
                self.at(self.now + self.wake_seconds[model.name] * self.random.uniform(0.7, 1.5), "woken", model)
            case LoadModel(model):
                self.at(self.now + 10 * self.wake_seconds[model.name], "loaded", model)
            case SleepModel(model, _):
                assert not model.running
                self.at(self.now + 0.1, "slept", model)
            case Admit(request):
                model, came, deadline = self.asked[request]
                assert model.state is State.AWAKE
                assert self.now < came + deadline
                self.waits.setdefault(model.name, []).append(self.now - came)
                self.at(self.now + self.random.expovariate(1 / 2.0), "end", (request, model))
            case Refuse(request, error):
                _, came, deadline = self.asked[request]
                assert deadline < inf, "a request without a deadline was refused"
                assert self.now <= came + deadline + 1e-6
                self.outcomes[request] = type(error).__name__


@pytest.mark.parametrize("seed", range(4))
def test_two_hours_of_random_requests_to_three_models_in_memory_for_one_and_a_half(seed: int):
    models = [
        Resident("large", 12 * GB // 10, preload=True),
        Resident("coder", 11 * GB // 10, preload=True),
        Resident("small", 4 * GB // 10, preload=True, priority=seed % 3 - 1),
    ]
    chance = random.Random(seed)
    limit = 17 * GB // 10
    simulated = Simulation(chance, Residency(models, limit), {"large": 1.0, "coder": 0.8, "small": 0.3})
    time = 0.0
    while time < 7200:
        rate = chance.choice((0.05, 0.5, 4))  # requests a second, for some minutes
        until = time + chance.uniform(60, 300)
        favourite = chance.choice(models)
        while time < until:
            time += chance.expovariate(rate)
            model = favourite if chance.random() < 0.5 else chance.choice(models)
            simulated.at(time, "ask", (model, chance.choice((inf, inf, 60.0, 10.0, 2.0))))
    simulated.run()

    assert simulated.outcomes.keys() == simulated.asked.keys()  # nothing is lost
    assert len(simulated.asked) > 3000
    assert simulated.most_held <= limit
    assert not any(model.running or model.waiting for model in models)
    # All others have their turn and finish what runs, at most, before it is a model's turn again.
    assert all(max(waits) < 120 for waits in simulated.waits.values())
    assert simulated.switches < 7200 / 2
    answered = sum(outcome == "done" for outcome in simulated.outcomes.values())
    assert answered > 0.7 * len(simulated.asked)
