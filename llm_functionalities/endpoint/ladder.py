"""Chooses a model for each request of a call that lists several: the largest one that is predicted to be in time.

The models are listed from the largest to the smallest; their times are predicted from their latest answers (`pace.py`).
If the chosen model fails or refuses the request, smaller models get it, then larger ones. The smallest model also gets
it, as a hedge, when the time left is what it needs itself.
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

# Minimum predicted probability of being in time for the chosen model.
LIKELY = 0.6

# Probability with which the hedge to the smallest model should be in time.
SAFE = 0.95

# Margin before the deadline in seconds, and as a share of the time left; the smaller one is used.
MARGIN_SECONDS, MARGIN_SHARE = 0.03, 0.05

# Reasons for which a model gets a request: it was chosen, another one failed, or another one is late.
CHOSEN, FALLBACK, LATE = "chosen", "fallback", "late"

# Prompts with images are measured separately: the characters of an image's data do not determine its time.
_IMAGE, _BEGINNING = "data:image/", 200

# Errors after which another model gets the request.
_NEXT = (EndpointDown, EndpointFailed, NotServed)


@dataclass(frozen=True, eq=False)
class LadderModel:
    """A model: its name in calls, and the endpoints that serve it."""

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
        """hedging: has no budget. count: called with the name of a model that gets a request, and the reason.

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

        A model without measurements gets a few requests at a time. A model that is down is chosen only if all are.
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
        """Returns the seconds after which the smallest model must get the request to be in time.

        The requests in progress at the chosen model are added to its load. Without measurements: half of the time.
        """
        needed = self._models[-1].pace.seconds(work, SAFE, more=chosen.pace.in_progress)
        return left / 2 if needed is None or needed == inf else max(0.0, left - needed)

    def _send(self, work: Work, kind: str, prompt: str, ask: Ask, model: LadderModel, why: str, call: Call) -> Pieces:
        """Yields the pieces of a model's answer, with its name, and measures its time."""
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
    """The models that calls can list."""

    def __init__(
        self,
        models: Mapping[str, LadderModel],
        hedging: Hedging,
        count: Callable[[str, str], None],
        count_answer: Callable[[str], None],
    ) -> None:
        """hedging, count, count_answer: see `Ladder`."""
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
