"""The models of a server of several models: loads, wakes and puts them to sleep as `residency.py` decides."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from time import perf_counter
from typing import Any

from shared.stubs.generate_pb2 import Generation
from tgi_server.contract import FinishReason
from tgi_server.router.errors import CannotSleep, RouterError, StartupError
from tgi_server.router.metrics import Metrics
from tgi_server.router.model_metrics import ModelMetrics
from tgi_server.router.residency import (
    Action,
    Admit,
    LoadModel,
    Refuse,
    Residency,
    Resident,
    SleepModel,
    State,
    WakeModel,
)
from tgi_server.router.scheduling.sequence import tell_end
from tgi_server.router.service import ListedModel, ModelState, Service, Sleeping
from tgi_server.router.stored_responses import StoredResponses
from tgi_server.router.submission import PreparedRequest, Sink, Submitter
from tgi_server.router.text.prefix_miss import ExplainedRequests

logger = logging.getLogger(__name__)

# The folders of absolute paths, which no response shows. URLs do not match.
_FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/'\"]+/)+")

# Interval and maximum number of checks whether the requests of a lost model have got their errors.
_POLL_SECONDS, _END_POLLS = 0.05, 100
_STATES: dict[State, ModelState] = {
    State.ABSENT: "asleep",
    State.LOADING: "loading",
    State.ASLEEP: "asleep",
    State.WAKING: "loading",
    State.AWAKE: "awake",
    State.FALLING_ASLEEP: "asleep",
}


@dataclass(slots=True, eq=False)
class HostedModel:
    """One of the models.

    names: its names in requests. task: embed or rank; None for a model that generates. service: None while the model is
    not loaded. metrics: kept when the shards are restarted. sleep_mode: sleep of its shards. gives_up_grammars: True if
    the next sleep also frees the tables for grammars. chats: True if it has a chat template. serving: task that serves
    the model until `lost` is set.
    """

    names: Sequence[str]
    resident: Resident
    task: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    service: Service | None = None
    sleep_mode: Sleeping | None = None
    gives_up_grammars: bool = False
    chats: bool = True
    serving: asyncio.Task[None] | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def state(self) -> ModelState:
        if self.resident.failed:
            return "failed"
        waits_to_load = self.resident.preload and self.resident.state is State.ABSENT
        return "loading" if waits_to_load else _STATES[self.resident.state]

    def is_named(self, name: str) -> bool:
        """Returns True for a name of the model, of one of its adapters, or of what it embeds or ranks with."""
        if name in self.names:
            return True
        return self.service is not None and self.service.is_served(name)


# Opens the service of a model whose shards have loaded it.
Open = Callable[[HostedModel], AbstractAsyncContextManager[Service]]


class Models:
    """All models of a server. The first one is the default.

    The launcher runs the shards: `load` asks it to start the shards of a model, and its reports go to `told`.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        most_bytes: int | None,
        open_service: Open,
        load: Callable[[int], None],
        max_stored_responses: int,
    ) -> None:
        """most_bytes: see Residency. open_service: context manager with the service of a model."""
        self.models = models
        self.metrics = ModelMetrics([model.name for model in models])
        self.changed = asyncio.Event()
        self._rules = Residency([model.resident for model in models], most_bytes)
        self._of = {model.resident.name: model for model in models}
        self._open = open_service
        self._load = load
        self._held: dict[int, Callable[[RouterError | None], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._request_ids = count(1)
        self._stored = StoredResponses(max_stored_responses)
        self._explained = ExplainedRequests()

    def find(self, name: str) -> HostedModel | None:
        """Returns the model that a request names; the default one for the name that TGI's clients use."""
        found = next((model for model in self.models if model.is_named(name)), None)
        return self.models[0] if found is None and name == "tgi" else found

    def listed(self) -> list[ListedModel]:
        """Returns the entries of lists of models."""
        return [
            ListedModel(model.names, model.service, model.state, model.resident.reason or None, model.task is None)
            for model in self.models
        ]

    def told(self, index: int, state: str, reason: str) -> None:
        """Handles a report of the launcher: the shards of a model are stopped, loading, loaded or failed."""
        model, now = self.models[index], perf_counter()
        if state == "loading" and model.resident.state is State.ABSENT:
            model.resident.state, model.resident.began_at = State.LOADING, now
        elif state == "loaded" and (model.serving is None or model.serving.done() or model.lost.is_set()):
            model.lost = asyncio.Event()
            model.serving = self._start(self._serve(model, model.lost, model.serving))
        elif state == "failed":
            model.lost.set()
            self._fail(model, reason)
        self.decide_soon()

    async def close(self) -> None:
        """Ends the services of all models."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def loaded(self, model: HostedModel, deadline: float = inf) -> Service:
        """Returns the service of a model, and loads the model before if necessary, in turn with other requests.

        Raises ModelNotReady, CannotBeInTime or RequestTimedOut.
        """
        while model.service is None:
            async with self.use(model, deadline):
                pass
        return model.service

    @asynccontextmanager
    async def use(self, model: HostedModel, deadline: float = inf) -> AsyncIterator[None]:
        """Waits like a request until the model is awake, and keeps it awake. Raises the errors of `loaded`."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin(error: RouterError | None) -> None:
            if admitted.done():
                return
            if error is None:
                admitted.set_result(None)
            else:
                admitted.set_exception(error)

        request = next(self._request_ids)
        self.ask(model, request, begin, deadline)
        try:
            await admitted
            yield
        finally:
            self.leave(model, request)

    def ask(
        self, model: HostedModel, request: int, begin: Callable[[RouterError | None], None], deadline: float
    ) -> None:
        """Queues a request until its model is awake.

        begin: called once, possibly before this returns; its argument is the error if the request is refused.
        """
        self._held[request] = begin
        self._rules.ask(model.resident, request, perf_counter(), deadline)
        self._decide()

    def leave(self, model: HostedModel, request: int) -> None:
        """Removes a request that has ended, or whose client has disconnected."""
        self._held.pop(request, None)
        self._rules.leave(model.resident, request, perf_counter())
        self.decide_soon()

    def decide_soon(self) -> None:
        """Schedules decisions for the next turn of the event loop."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        now = perf_counter()
        for action in self._rules.decide(now):
            self._do(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (following := self._rules.next_time(now)) < inf:
            self._timer = asyncio.get_running_loop().call_later(max(following - now, 0.0), self.decide_soon)
        for model in self.models:
            self.metrics.awake(model.name, awake=model.state == "awake")
        self.changed.set()
        self.changed.clear()

    def _do(self, action: Action) -> None:
        match action:
            case Admit(request):
                if begin := self._held.pop(request, None):
                    begin(None)
            case Refuse(request, error):
                if begin := self._held.pop(request, None):
                    begin(error)
            case LoadModel(resident):
                logger.info("loading %s", resident.name)
                self._load(self.models.index(self._of[resident.name]))
            case WakeModel(resident):
                self._start(self._wake(self._of[resident.name]))
            case SleepModel(resident, reason):
                self._start(self._sleep(self._of[resident.name], reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _fail(self, model: HostedModel, reason: str, *, lost: bool = True) -> None:
        logger.error("%s is not available: %s", model.name, reason)
        self.metrics.failed(model.name)
        self._rules.failed(model.resident, perf_counter(), _FOLDERS.sub("", reason), lost=lost)

    async def _serve(self, model: HostedModel, lost: asyncio.Event, earlier: asyncio.Task[None] | None) -> None:
        """Serves a model until its shards have ended. earlier: the task of the shards before, which must end first."""
        if earlier is not None:
            await asyncio.wait((earlier,))
        serving = asyncio.ensure_future(self._serve_opened(model, lost))
        ending = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
            model.service = None
            if lost.is_set():
                await asyncio.wait((serving,), timeout=2 * _POLL_SECONDS * _END_POLLS)
        finally:
            model.service = None
            ending.cancel()
            serving.cancel()
            await asyncio.wait((serving,))
        if serving.cancelled() or (error := serving.exception()) is None or lost.is_set():
            return
        if not isinstance(error, StartupError | RouterError):
            logger.error("the service of %s failed", model.name, exc_info=error)
        self._fail(model, str(error))
        self.decide_soon()

    async def _serve_opened(self, model: HostedModel, lost: asyncio.Event) -> None:
        async with self._open(model) as opened:
            mode = model.sleep_mode = opened.sleep_mode
            model.resident.can_sleep = mode is not None
            if mode is not None:
                mode.on_wanted = lambda: self._want(model)
            model.service = replace(
                opened,
                submitter=WakingSubmitter(self, model, opened.submitter),
                sleep_mode=_Managed(self, model),
                in_use=partial(self.use, model),
                models=self.listed,
                stored=self._stored,
                explained=self._explained,
                request_ids=self._request_ids,
            )
            self._rules.loaded(model.resident, perf_counter())
            self.metrics.loaded(model.name, model.resident.load_seconds)
            self.decide_soon()
            await lost.wait()
            model.service = None
            # The scheduler fails the running requests; they get their errors before it is stopped.
            for _ in range(_END_POLLS):
                if not opened.capacity.in_flight:
                    break
                await asyncio.sleep(_POLL_SECONDS)

    def _want(self, model: HostedModel) -> None:
        """Wakes a model for work that is not a queued request."""

        async def wake() -> None:
            with suppress(RouterError):  # it is logged
                async with self.use(model):
                    pass

        if not model.resident.waiting:
            self._start(wake())

    async def dismiss(self, model: HostedModel, *, grammars: bool) -> None:
        """Returns when the model sleeps, after its running requests have ended. Raises CannotSleep.

        grammars: True if the tables for grammars are freed, too.
        """
        resident, model.gives_up_grammars = model.resident, grammars
        while resident.state is not State.ASLEEP:
            if not resident.can_sleep:
                raise CannotSleep(f"{model.name} cannot sleep; the log has the reason")
            if resident.state is State.ABSENT:
                return
            resident.dismissed = resident.state is not State.FALLING_ASLEEP
            self.decide_soon()
            await self.changed.wait()

    async def _wake(self, model: HostedModel) -> None:
        mode, lost = model.sleep_mode, model.lost
        assert mode is not None
        mode.log = lambda done: logger.info("%s %s", model.name, done)
        try:
            await mode.wake()
        except RouterError as error:
            if not lost.is_set():
                self._fail(model, f"it could not be woken: {error}", lost=False)
        else:
            if not lost.is_set():
                self._rules.woken(model.resident, perf_counter())
        self.decide_soon()

    async def _sleep(self, model: HostedModel, reason: str) -> None:
        mode, lost = model.sleep_mode, model.lost
        assert mode is not None
        mode.log = lambda done: logger.info("%s %s (%s)", model.name, done, reason)
        try:
            released = await mode.sleep(grammars=model.gives_up_grammars)
        except RouterError as error:
            if not lost.is_set():
                logger.error("%s cannot be put to sleep, and stays awake: %s", model.name, error)
                self._rules.stayed_awake(model.resident)
        else:
            if not lost.is_set():
                self._rules.slept(model.resident, perf_counter(), released)
        model.gives_up_grammars = False
        self.decide_soon()


class _Managed:
    """Sleep of one model by `/sleep` and `/wake_up` (`service.Sleeping`) on a server of several models."""

    def __init__(self, models: Models, model: HostedModel) -> None:
        self._models = models
        self._model = model
        self.on_wanted: Callable[[], None] = lambda: None  # requests wake the model before they reach the scheduler
        self.log: Callable[[str], None] = lambda done: None  # the sleep mode of the shards logs

    @property
    def awake(self) -> bool:
        return self._model.resident.state is State.AWAKE

    async def sleep(self, *, grammars: bool = False) -> int:
        await self._models.dismiss(self._model, grammars=grammars)
        return 0

    async def wake(self) -> None:
        async with self._models.use(self._model):
            pass


class WakingSubmitter:
    """Passes requests to the scheduler of a model once the model is awake (`submission.Submitter`)."""

    def __init__(self, models: Models, model: HostedModel, scheduler: Submitter) -> None:
        self._models = models
        self._model = model
        self._scheduler = scheduler
        self._begun: set[int] = set()

    def submit(self, request: PreparedRequest, sink: Sink) -> None:
        """Queues the request, and wakes its model if that sleeps."""

        def begin(error: RouterError | None) -> None:
            if error is not None:
                tell_end(request.id, sink, error)
                return
            self._begun.add(request.id)
            self._scheduler.submit(request, _WatchedSink(sink, lambda: self._end(request.id)))

        self._models.ask(self._model, request.id, begin, min(request.deadline, request.first_token_by))

    def cancel(self, request_id: int) -> str:
        """Cancels the request, waiting or running. Returns its progress for the log."""
        begun = request_id in self._begun
        progress = self._scheduler.cancel(request_id) if begun else f"it waited for {self._model.name} to be awake"
        self._end(request_id)
        return progress

    def _end(self, request_id: int) -> None:
        self._begun.discard(request_id)
        self._models.leave(self._model, request_id)


class _WatchedSink:
    """A sink that also reports the end of its request."""

    def __init__(self, sink: Sink, ended: Callable[[], None]) -> None:
        self._sink = sink
        self._ended = ended
        self.started = sink.started
        self.push: Callable[[Generation], FinishReason | None] = sink.push

    def finished(self, reason: FinishReason) -> None:
        self._ended()
        self._sink.finished(reason)

    def failed(self, error: RouterError) -> None:
        self._ended()
        self._sink.failed(error)
