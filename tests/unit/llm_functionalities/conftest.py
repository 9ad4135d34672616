"""A stand-in for a text-generation server, and the HTTP client that requests go through."""

from collections.abc import Iterator

import httpx2
import pytest
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from llm_functionalities.endpoint.resolver import Resolver
from llm_functionalities.endpoint.transport import BoundedBackend, BoundedTransport, install
from tests.fakes.model_server import ModelServer

MAX_RESPONSE_BYTES = 50_000


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    client = install(BoundedTransport(BoundedBackend(Resolver(), 0.5, 2), None, MAX_RESPONSE_BYTES))
    yield client
    client.close()
    set_client_factory(default_client_factory)  # other tests of this process have clients of their own
