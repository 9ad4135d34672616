"""Who may call, where the server has an API key."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tgi_server.router.api.answers import error_answer
from tgi_server.router.errors import Unauthorized


class ApiKeyMiddleware:
    """Wants `Authorization: Bearer KEY` of every POST. Health, metrics and what is served stay open, as in TGI."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                answer = error_answer(Unauthorized("the API key is missing or wrong"), scope["path"], headers)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
