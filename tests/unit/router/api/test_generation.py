"""Sequences are waited for until all have ended, and a stream holds its places until then."""

import httpx
import pytest

from tests.fakes.router_service import RouterService
from tgi_server.router.api.generation import AllEnded
from tgi_server.router.errors import GenerationFailed


async def test_the_first_failure_ends_the_wait_for_several_sequences():
    end, error = AllEnded(3), GenerationFailed("no")
    end(None)
    end(error)
    end(None)
    with pytest.raises(GenerationFailed, match="no"):
        await end.future
    end = AllEnded(2)
    end(None)
    assert not end.future.done()
    end(None)
    assert await end.future is None


async def test_a_stream_holds_its_place_until_its_last_byte(router: RouterService, client: httpx.AsyncClient):
    body = {"inputs": "hello"}
    response = await client.post("/generate_stream", json=body)
    assert response.text.count("data:") == 3
    assert router.service.capacity.in_flight == 0
    assert "tgi_request_success 1.0" in router.service.metrics.expose().decode()
