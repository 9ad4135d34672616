"""Routes that answer requests themselves."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class DirectRoute(APIRoute):
    """Hands the request to the endpoint as it is: FastAPI's own work on each request would cost more than ours.

    The endpoint takes a Request and returns a Response; its models are named for the API's description only.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint
