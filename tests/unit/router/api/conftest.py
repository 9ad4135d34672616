"""A router's service without sockets and shards, and a client of its routes."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.router_service import RouterService, ScriptedScheduler


@pytest.fixture
def router() -> RouterService:
    return RouterService()


@pytest.fixture
def scheduler(router: RouterService) -> ScriptedScheduler:
    return router.scheduler


@pytest.fixture
async def client(router: RouterService) -> AsyncIterator[httpx.AsyncClient]:
    async with router.client() as client:
        yield client
