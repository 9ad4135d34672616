"""The calls Sleep and Wake of a shard: one at a time, and not while its encoders compute."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from shared.stubs import generate_pb2 as pb
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.sleep import SleepingModel
from tgi_server.shard.encoder_queue import EncoderQueue

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SleepCalls:
    """Puts the models of a shard to sleep, and wakes them.

    Steps run on the event loop, so the router sends none meanwhile; encoders have a thread of their own, in which the
    models fall asleep, too.
    """

    def __init__(self, model: SleepingModel, encoders: EncoderQueue | None, on_fatal: Callable[[], None]) -> None:
        """encoders: None: nothing is computed beside the steps. on_fatal: called when the weights are lost."""
        self._model = model
        self._encoders = encoders
        self._on_fatal = on_fatal
        self._lock = asyncio.Lock()

    def check_awake(self) -> None:
        """Raises InvalidCall while the models sleep."""
        if self._model.asleep:
            raise InvalidCall("the model sleeps; wake it first")

    async def sleep(self) -> pb.SleepResponse:
        """Raises InvalidCall, also for models that cannot sleep."""
        began = time.perf_counter()
        async with self._lock:
            released = await self._alone(self._model.sleep)
        logger.info("the model sleeps: %d MB of memory released in %.2f s", released >> 20, time.perf_counter() - began)
        return pb.SleepResponse(released_bytes=released)

    async def wake(self) -> pb.WakeResponse:
        """Ends the process if the weights cannot be read back."""
        began = time.perf_counter()
        async with self._lock:
            try:
                await self._alone(self._model.wake)
            except OSError as error:
                logger.critical("the model cannot wake, so this shard ends: %s", error)
                self._on_fatal()
        logger.info("the model woke in %.2f s", time.perf_counter() - began)
        return pb.WakeResponse()

    async def _alone(self, work: Callable[[], T]) -> T:
        """Returns the result of a function that runs while no encoder computes."""
        if self._encoders is None:
            return await asyncio.to_thread(work)
        return await self._encoders.run(lambda pause, piece_seconds: work(), None)
