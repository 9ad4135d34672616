"""The HTTP side of `huggingface_hub.InferenceClient`, which takes its HTTP client from a factory of the process."""

import ssl
from collections.abc import Iterable, Iterator
from typing import cast

import httpcore2
import httpx2
from huggingface_hub import constants, set_client_factory

from llm_functionalities.call import Call, current_call
from llm_functionalities.errors import BadAnswer, ConnectionLost
from llm_functionalities.network import BoundedBackend

KEEP_ALIVE_SECONDS = 3.0
"""Less than servers keep an idle connection (uvicorn: 5 s), so that none is picked just as the server closes it."""


class BoundedTransport(httpx2.BaseTransport):
    """Sends each request within the current `Call`, once, over connections that outlive it.

    No redirect is followed and no proxy of the environment is used: the endpoint is what it was configured to be.
    """

    def __init__(self, backend: BoundedBackend, tls: ssl.SSLContext | None, max_answer_bytes: int) -> None:
        self._pool = httpcore2.ConnectionPool(
            ssl_context=tls,
            max_connections=None,  # as many as there are workers
            keepalive_expiry=KEEP_ALIVE_SECONDS,
            network_backend=backend,
        )
        self._max_answer_bytes = max_answer_bytes

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises the ModelErrors of the network."""
        call = current_call()
        call.send_once()
        try:
            response = self._pool.handle_request(
                httpcore2.Request(
                    method=request.method,
                    url=httpcore2.URL(
                        scheme=request.url.raw_scheme,
                        host=request.url.raw_host,
                        port=request.url.port,
                        target=request.url.raw_path,
                    ),
                    headers=request.headers.raw,
                    content=cast(Iterable[bytes], request.stream),
                )
            )
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            call.remaining()
            raise ConnectionLost(str(error)) from None
        return httpx2.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Answer(cast(httpx2.SyncByteStream, response.stream), call, self._max_answer_bytes),
            extensions=response.extensions,
        )

    def close(self) -> None:
        self._pool.close()


class _Answer(httpx2.SyncByteStream):
    """An answer's bytes, refused beyond `limit` of them."""

    def __init__(self, stream: httpx2.SyncByteStream, call: Call, limit: int) -> None:
        self._stream = stream
        self._call = call
        self._limit = limit

    def __iter__(self) -> Iterator[bytes]:
        received = 0
        try:
            for piece in self._stream:
                received += len(piece)
                if received > self._limit:
                    raise BadAnswer(f"the answer is longer than {self._limit} bytes")
                yield piece
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            self._call.remaining()
            raise ConnectionLost(str(error)) from None

    def close(self) -> None:
        # Before the connection goes back to the pool: a late `cancel` must not hit the next call.
        self._call.release()
        self._stream.close()


def install(transport: BoundedTransport) -> httpx2.Client:
    """Makes every InferenceClient of the process use `transport`, and returns the HTTP client that they share."""
    # With telemetry on, the first request would fetch a list from huggingface.co to describe this machine.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    client = httpx2.Client(transport=transport, timeout=None, follow_redirects=False, trust_env=False)
    set_client_factory(lambda: client)
    return client
