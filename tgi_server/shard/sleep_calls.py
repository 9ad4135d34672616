"""The calls Sleep and Wake of a shard. They run one at a time, and not while encoders compute."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from shared.stubs import generate_pb2 as pb
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.sleep import SleepingModel
from tgi_server.shard.encoder_queue import EncoderQueue
from tgi_server.shard.grammar_queue import GrammarQueue

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SleepCalls:
    """Puts the models of a shard to sleep, and wakes them.

    The router sends no steps meanwhile. Encoders compute in a thread, in which the models are put to sleep and woken,
    too.
    """

    def __init__(
        self,
        model: SleepingModel,
        encoders: EncoderQueue | None,
        grammars: GrammarQueue | None,
        on_fatal: Callable[[], None],
    ) -> None:
        """encoders: None: only steps are computed. grammars: None: there are none. on_fatal: called if the weights are
        lost.
        """
        self._model = model
        self._encoders = encoders
        self._grammars = grammars
        self._forgot = False  # the tables for grammars
        self._on_fatal = on_fatal
        self._lock = asyncio.Lock()

    def check_awake(self) -> None:
        """Raises InvalidCall while the models sleep."""
        if self._model.asleep:
            raise InvalidCall("the model sleeps; wake it first")

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """Puts the models to sleep. Raises InvalidCall, also for models that cannot sleep."""
        began = time.perf_counter()
        async with self._lock:
            if request.grammars and self._grammars is not None:
                self._grammars.forget()
                self._forgot = True
            released = await self._alone(self._model.sleep)
        logger.debug(
            "the model sleeps: %d MB of memory released in %.2f s", released >> 20, time.perf_counter() - began
        )
        return pb.SleepResponse(released_bytes=released)

    async def wake(self) -> pb.WakeResponse:
        """Wakes the models. Ends the process if the weights cannot be read back."""
        began = time.perf_counter()
        async with self._lock:
            if not self._model.asleep:
                return pb.WakeResponse()
            try:
                await self._alone(self._model.wake)
            except OSError as error:
                logger.critical("the model cannot wake, so this shard ends: %s", error)
                self._on_fatal()
            if self._forgot and self._grammars is not None:
                self._grammars.refresh()
                self._forgot = False
        logger.debug("the model woke in %.2f s", time.perf_counter() - began)
        return pb.WakeResponse()

    async def _alone(self, work: Callable[[], T]) -> T:
        """Runs `work` while no encoder computes. Returns its result."""
        if self._encoders is None:
            return await asyncio.to_thread(work)
        return await self._encoders.run(lambda pause, piece_seconds: work(), None)
