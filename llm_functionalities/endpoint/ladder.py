"""Chooses the model for each request of a call that names several: the largest one that will be in time.

The models are named from the largest to the smallest. The time that each needs is predicted from its last answers
(`pace.py`). While a larger one has not begun its answer, the smallest one is the fallback: it is asked if the larger
one fails or refuses, and, as a hedge, when no more time is left than it needs itself.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from llm_functionalities.endpoint.balancer import GENERATE, STREAM, Ask, Balancer, Pieces, Sender
from llm_functionalities.endpoint.call import Call
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.hedging import Hedging
from llm_functionalities.endpoint.pace import ModelPace, Work
from llm_functionalities.errors import (
    Cancelled,
    DeadlineExceeded,
    EndpointDown,
    EndpointFailed,
    ModelError,
    NotServed,
)

# A model is chosen if it would be in time in this share of cases: the fallback is there for the others.
LIKELY = 0.6

# The fallback is asked when it needs all the time that is left, in this share of cases.
SAFE = 0.95

# An answer is to be complete so many seconds before its deadline, or with this share of the time left if that is less.
MARGIN_SECONDS, MARGIN_SHARE = 0.03, 0.05

# Why a model gets a request: it was chosen, another one failed, or another one is late.
CHOSEN, FALLBACK, LATE = "chosen", "fallback", "late"

# The time for an image has little to do with the characters of its data.
_IMAGE, _BEGINNING = "data:image/", 200

# After one of these errors another model may have the request.
_NEXT = (EndpointDown, EndpointFailed, NotServed)


@dataclass(frozen=True, eq=False)
class LadderModel:
    """A model by the name that callers know it by, and the endpoints that have it."""

    name: str
    balancer: Balancer
    pace: ModelPace = field(default_factory=ModelPace)


class Ladder(Sender):
    """Sends each request to one of `models`, from the largest to the smallest."""

    def __init__(
        self,
        models: Sequence[LadderModel],
        hedging: Hedging,
        count: Callable[[str, str], None],
        count_answer: Callable[[str], None],
    ) -> None:
        """hedging: without a budget. count: called with the name of a model that gets a request, and why.

        count_answer: called with the name of the model that answered.
        """
        self._models = models
        self._hedging = hedging
        self._count = count
        self._count_answer = count_answer

    def destinations(self, prompt: str) -> list[Endpoint]:
        return [endpoint for model in self._models for endpoint in model.balancer.destinations(prompt)]

    def pieces(self, kind: str, prompt: str, ask: Ask, call: Call, max_tokens: int = 0) -> Pieces:
        left = call.due.remaining()
        left -= min(MARGIN_SECONDS, MARGIN_SHARE * left)
        # A stream and a whole answer take the same time until they are complete. Images come first in a prompt.
        measured_as = (GENERATE if kind == STREAM else kind) + (" images" if _IMAGE in prompt[:_BEGINNING] else "")
        work = Work(measured_as, len(prompt), max_tokens)
        chosen, smallest = self.choose(work, left), self._models[-1]
        place = self._models.index(chosen)
        order = (*self._models[place:], *reversed(self._models[:place]))
        send = partial(self._send, work, kind, prompt, ask)
        claimed = threading.Lock()  # by the attempt that asks the smallest model

        def one_by_one(call: Call) -> Pieces:
            problem: ModelError | None = None
            for model in order:
                if model is smallest and not claimed.acquire(blocking=False):
                    break
                begun = False
                try:
                    with closing(send(model, CHOSEN if model is chosen else FALLBACK, call.attempt())) as pieces:
                        for piece in pieces:
                            begun = True
                            yield piece
                    return
                except _NEXT as error:
                    if begun:
                        raise
                    problem = problem or error
            assert problem is not None
            raise problem

        def hedge(call: Call) -> Pieces:
            if claimed.acquire(blocking=False):
                yield from send(smallest, LATE, call)

        if chosen is smallest:
            answer = one_by_one(call)
        else:
            after = self.fallback_after(work, left, chosen)
            answer = self._hedging.race(kind, call, one_by_one, lambda _: hedge, after)
        with closing(answer):
            for number, piece in enumerate(answer):
                if not number:
                    self._count_answer(piece.model)
                yield piece

    def choose(self, work: Work, left: float) -> LadderModel:
        """Returns the largest model that needs at most `left` seconds, or the fastest one if all need more.

        One that is not measured yet gets a few requests at a time. One that is down is chosen only if all are.
        """
        models = [model for model in self._models if model.balancer.healthy] or self._models
        seconds: dict[LadderModel, float] = {}
        for model in models:
            needed = model.pace.seconds(work, LIKELY, fades=model is not self._models[-1])
            if needed is None or needed <= left:
                return model
            seconds[model] = needed
        smallest = models[-1]
        return smallest if seconds[smallest] == inf else min(models, key=seconds.__getitem__)

    def fallback_after(self, work: Work, left: float, chosen: LadderModel) -> float:
        """Returns in how many seconds the smallest model has to be asked so that its answer is in time.

        It may have to answer all that the chosen model works on. An unknown model gets half of the time.
        """
        needed = self._models[-1].pace.seconds(work, SAFE, more=chosen.pace.in_progress)
        return left / 2 if needed is None or needed == inf else max(0.0, left - needed)

    def _send(self, work: Work, kind: str, prompt: str, ask: Ask, model: LadderModel, why: str, call: Call) -> Pieces:
        """Yields what a model answers, with its name, and measures how long it takes."""
        self._count(model.name, why)
        running = model.pace.began(work)
        tokens: int | None = None
        failed = False
        try:
            with closing(model.balancer.pieces(kind, prompt, ask, call, work.max_tokens)) as pieces:
                for piece in pieces:
                    if kind != STREAM or piece.finish_reason:
                        tokens = piece.generated_tokens
                    yield replace(piece, model=model.name)
        except ModelError as error:
            failed = not isinstance(error, Cancelled | DeadlineExceeded)
            raise
        finally:
            model.pace.ended(running, tokens, failed=failed)


class Ladders:
    """The models that calls may name."""

    def __init__(
        self,
        models: Mapping[str, LadderModel],
        hedging: Hedging,
        count: Callable[[str, str], None],
        count_answer: Callable[[str], None],
    ) -> None:
        """hedging, count, count_answer: as for `Ladder`."""
        self._models = models
        self._made = partial(Ladder, hedging=hedging, count=count, count_answer=count_answer)
        self._hedging = hedging

    @property
    def ready(self) -> bool:
        """True if at least one model has an endpoint whose circuit is closed."""
        return any(model.balancer.ready for model in self._models.values())

    def of(self, names: Sequence[str]) -> Ladder:
        """Returns the ladder of these models. Raises KeyError."""
        return self._made([self._models[name] for name in names])

    def stop(self, timeout: float) -> None:
        """Ends the threads that watch endpoints, within about `timeout` seconds for each."""
        self._hedging.stop()
        for model in self._models.values():
            model.balancer.stop(timeout)
