"""/sleep, /wake_up and /is_sleeping of vLLM's API: the model frees its memory, and allocates it again."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.documentation import DescribedRoute, Responses, answered_by, described
from tgi_server.router.api.encoding import json_response
from tgi_server.router.errors import Forbidden, InvalidRequest
from tgi_server.router.schemas.base import ErrorResponse
from tgi_server.router.schemas.info import SleepInfo
from tgi_server.router.service import Service, Sleeping

_RESPONSES: Responses = {
    200: {"description": "Success"},
    403: described("This server was started without --enable-sleep-mode", ErrorResponse),
    409: described("The model cannot sleep", ErrorResponse),
    422: described("A parameter is not known", ErrorResponse),
    503: described("The shards do not answer", ErrorResponse),
}
_PARTS = {"weights", "kv_cache"}


def sleep_routes(service: Service) -> list[Route]:
    def sleep_mode() -> Sleeping:
        if service.sleep_mode is None or not service.policy.allow_sleep:
            raise Forbidden("the model stays awake: this server was started without --enable-sleep-mode")
        return service.sleep_mode

    async def sleep(request: Request) -> Response:
        mode, levels = sleep_mode(), request.query_params.getlist("level")
        _check("level", levels, ("1", "2"))
        _check("mode", request.query_params.getlist("mode"), ("wait",))
        await mode.sleep(grammars="2" in levels)
        return Response()

    async def wake(request: Request) -> Response:
        mode, tags = sleep_mode(), request.query_params.getlist("tags")
        if tags and set(tags) != _PARTS:
            raise InvalidRequest.at(
                "tags", "must be left out, or name both `weights` and `kv_cache`: they wake together"
            )
        await mode.wake()
        return Response()

    async def is_sleeping(_: Request) -> Response:
        return json_response(SleepInfo(is_sleeping=not sleep_mode().awake))

    return [
        DescribedRoute(
            "/sleep", sleep, "Put the model to sleep, once the requests that run have ended", _RESPONSES, method="POST"
        ),
        DescribedRoute("/wake_up", wake, "Wake the model; a request wakes it, too", _RESPONSES, method="POST"),
        DescribedRoute("/is_sleeping", is_sleeping, "True unless the model is awake", answered_by(SleepInfo)),
    ]


def _check(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Raises InvalidRequest for an unknown value of a query parameter."""
    for value in values:
        if value not in known:
            raise InvalidRequest.at(name, f"is {value[:100]!r}; it must be {' or '.join(known)}, or be left out")
