"""The one way in: every POST is admitted, read as a model, handled, and answered or refused."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.admission import Admission
from tgi_server.router.api.documentation import DescribedRoute, Responses, answered_by
from tgi_server.router.api.event_stream import EventStream
from tgi_server.router.errors import RouterError
from tgi_server.router.schemas.base import ResponseModel
from tgi_server.router.service import Service

M = TypeVar("M", bound=BaseModel)


class PostRoutes(list[Route]):
    """The routes of one interface. errors: as the API's description has them."""

    def __init__(self, service: Service, errors: Responses) -> None:
        super().__init__()
        self._service = service
        self._errors = errors

    def receive(
        self,
        path: str,
        summary: str,
        model: type[M],
        handle: Callable[[Admission, M], Awaitable[Response]],
        answer: type[ResponseModel] | str | None,
        events: type[ResponseModel] | str | None = None,
        errors: Responses | None = None,
    ) -> None:
        """Adds a route whose requests are a `model`. answer, events: the description of a response in one piece, and of
        a stream; None: there is none. errors: None: those of the interface.
        """

        async def respond(request: Request) -> Response:
            return await respond_to(self._service, request, model, handle)

        responses = (errors or self._errors) | answered_by(answer, events)
        self.append(DescribedRoute(path, respond, summary, responses, method="POST", body=model))


async def respond_to(
    service: Service, request: Request, model: type[M], handle: Callable[[Admission, M], Awaitable[Response]]
) -> Response:
    """Returns what `handle` makes of a request, whose body is a `model`. A stream closes the admission at its end.

    Raises RouterError.
    """
    admission = Admission(service, request)
    try:
        response = await handle(admission, await admission.read(model))
    except asyncio.CancelledError as error:
        admission.close(admission.refusal or error)
        if admission.refusal is None or (task := asyncio.current_task()) is None:
            raise
        task.uncancel()
        raise admission.refusal from None
    except RouterError as error:
        admission.close(error)
        raise
    except Exception as fault:
        failure = RouterError("the server failed to handle the request")
        failure.__cause__ = fault
        admission.close(failure)
        raise failure from None
    if not isinstance(response, EventStream):
        admission.close()
    return response
