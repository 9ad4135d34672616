"""A proxy that records what an agent sends and gets."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

_HOP_BY_HOP = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request with its response. ignored: the fields that the response reports as ignored."""

    method: str
    path: str
    body: bytes
    status: int
    ignored: str
    response: bytes

    @property
    def content(self) -> Any:
        """The JSON of the request; None without a body."""
        return json.loads(self.body) if self.body else None


class RecordingProxy:
    """Passes requests on to `upstream` and their responses back, each piece as soon as it comes."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.recorded: list[Recorded] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RecordingProxy"]:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            async with ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False) as self._session:
                yield self
        finally:
            await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        asked = self._session.request(request.method, self.upstream + request.raw_path, data=body, headers=headers)
        async with asked as got:
            kept = {name: value for name, value in got.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=got.status, headers=kept)
            await response.prepare(request)
            pieces = []
            async for piece in got.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
            ignored = got.headers.get("x-ignored-fields", "")
            self.recorded.append(Recorded(request.method, request.path, body, got.status, ignored, b"".join(pieces)))
            return response
