"""Checks that the shards still compute."""

import asyncio

from tgi_server.router.errors import Unhealthy
from tgi_server.router.scheduling.scheduler import Scheduler
from tgi_server.router.scheduling.shard_client import ShardedClient

# Seconds that a check may take.
HEALTH_SECONDS = 10.0


class HealthCheck:
    """Has the shards compute something. Concurrent checks share one call.

    Shards handle the call only after the step that they compute, so the step's response counts as well. If shards
    answer the call but have not answered a step for HEALTH_SECONDS, they have lost the step.
    """

    def __init__(self, scheduler: Scheduler, shards: ShardedClient) -> None:
        self._scheduler = scheduler
        self._shards = shards
        self._running: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Checks the shards. Raises Unhealthy."""
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._check())
        await asyncio.shield(self._running)

    async def _check(self) -> None:
        asked = asyncio.ensure_future(self._shards.health(HEALTH_SECONDS))
        step = asyncio.ensure_future(self._scheduler.next_response())
        try:
            await asyncio.wait((asked, step), return_when=asyncio.FIRST_COMPLETED)
            if asked.done() or not self._scheduler.healthy:
                await asked
            if asked.done() and (seconds := self._scheduler.unanswered_seconds) > HEALTH_SECONDS:
                raise Unhealthy(f"the shards answer, but have computed no step for {seconds:.0f} s")
        finally:
            asked.cancel()
            step.cancel()
