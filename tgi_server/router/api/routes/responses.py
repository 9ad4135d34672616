"""/v1/responses, and /v1/embeddings, which is refused by name."""

from collections.abc import Callable, Sequence
from itertools import count
from time import time
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tgi_server.router.api.access import tenant_of
from tgi_server.router.api.body import SMALL
from tgi_server.router.api.documentation import OPENAI_ERRORS, Responses, answered_by, described, endpoint
from tgi_server.router.api.encoding import JSON, json_response, named_event, to_json
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.exchange import AllEnded, DirectRoute, Exchange, owner_of, respond_to
from tgi_server.router.api.routes.chat import ChatChoices
from tgi_server.router.api.routes.chat_prompt import ChatPlan, prompt_for_chat
from tgi_server.router.api.routes.response_items import ResponseItems
from tgi_server.router.api.routes.response_request import (
    input_turns,
    output_turns,
    plan_response,
    turns_from_json,
    turns_to_json,
)
from tgi_server.router.api.stored_responses import StoredResponse, StoredResponses, new_id
from tgi_server.router.errors import NoSuchResponse, PayloadTooLarge, PreviousResponseNotFound
from tgi_server.router.options import Dialect, rows
from tgi_server.router.schemas.openai import OpenAIErrorResponse
from tgi_server.router.schemas.responses import (
    DeletedResponse,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from tgi_server.router.service import Service

_KEPT_ERRORS: Responses = {
    401: OPENAI_ERRORS[401],
    404: described("The response is not stored", OpenAIErrorResponse),
}
# Options that a response repeats of its request, and what it does not repeat.
_REPEATED = {"temperature", "top_p", "max_output_tokens", "top_logprobs"}
_NOT_REPEATED = {
    *("input", "include", "stream", "model", "chat_template_kwargs"),
    *({name for row in rows(Dialect.RESPONSES) for name in row.names} - _REPEATED),
}
Status = Literal["in_progress", "completed", "incomplete"]
_ID = {"parameters": [{"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}]}


def response_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)
    kept = StoredResponses(service.policy.max_stored_responses)

    @router.post(
        "/v1/responses",
        summary="Respond to an input, in one piece or as server-sent events",
        **endpoint(OPENAI_ERRORS, ResponsesRequest, ResponseObject, ResponseEvent),
    )
    async def create(request: Request) -> Response:
        return await respond_to(service, request, ResponsesRequest, lambda *asked: _respond(kept, *asked))

    @router.get(
        "/v1/responses/{response_id}",
        summary="A stored response",
        response_class=Response,
        responses=_KEPT_ERRORS | answered_by(ResponseObject),
        openapi_extra=_ID,
    )
    async def retrieve(request: Request) -> Response:
        stored = kept.get(tenant_of(request), request.path_params["response_id"])
        owner = owner_of(request)
        service.capacity.take(1, owner)
        return _PlacedResponse(stored.response, lambda: service.capacity.give_back(1, owner))

    @router.delete(
        "/v1/responses/{response_id}",
        summary="Forget a response",
        response_class=Response,
        responses=_KEPT_ERRORS | answered_by(DeletedResponse),
        openapi_extra=_ID,
    )
    async def delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        kept.delete(tenant_of(request), response_id)
        return json_response(DeletedResponse(id=response_id))

    return router


class _PlacedResponse(Response):
    """A stored response, which counts as a request in flight until it is sent."""

    media_type = JSON

    def __init__(self, content: bytes, on_sent: Callable[[], None]) -> None:
        super().__init__(content)
        self._on_sent = on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_sent()


async def _respond(kept: StoredResponses, exchange: Exchange, request: ResponsesRequest) -> Response:
    service, tenant = exchange.service, exchange.tenant
    earlier = b""
    if request.previous_response_id is not None:
        try:
            earlier = kept.get(tenant, request.previous_response_id).turns
        except NoSuchResponse as error:
            raise PreviousResponseNotFound(str(error)) from None
    exchange.size += len(earlier)

    def prepare() -> tuple[bytes, ChatPlan, _Response]:
        given = request.input
        turns = input_turns(given if isinstance(given, str) else [item.root for item in given])
        conversation = turns_to_json(earlier, turns)
        if len(conversation) > (most := service.policy.payload_limit):
            raise PayloadTooLarge(f"the conversation has more than {most} bytes (--payload-limit); begin another one")
        plan = plan_response(service, request, [*turns_from_json(earlier), *turns])
        return conversation, plan, _Response(request, plan.options.adapter_id or service.model.names[0])

    conversation, plan, response = await service.text.threads.handle_text(exchange.size, prepare, at_once=SMALL)
    prompt = await prompt_for_chat(exchange, lambda: plan)
    outbox = Outbox() if request.stream else None
    emit = _nothing if outbox is None else _Events(outbox)
    items = ResponseItems(emit)
    for kind in ("response.created", "response.in_progress"):
        emit(kind, {"response": response.shown("in_progress")})

    def finish() -> tuple[Status, ResponseObject]:
        """Stores the response. Returns its status and the response."""
        status: Status = "incomplete" if items.incomplete else "completed"
        reason = "max_output_tokens" if items.reason == "length" else None
        shown = response.shown(status, items.shown(), _usage(choices, items), reason)
        if request.store:
            turns = turns_to_json(conversation, output_turns(items.items))
            kept.add(tenant, response.id, StoredResponse(to_json(shown), turns))
        return status, shown

    def last_words() -> bytes:
        status, shown = finish()
        emit(f"response.{status}", {"response": shown})
        return b""

    end = AllEnded(1) if outbox is None else exchange.stream_end(outbox, last_words=last_words)
    choices = ChatChoices.begin(exchange, prompt, lambda _: items, end)
    if outbox is not None:
        return exchange.stream(outbox, characters=len(prompt.text), collects=True)
    assert isinstance(end, AllEnded)
    await exchange.wait_for(end.future)
    return exchange.respond(finish()[1], characters=len(prompt.text), streams=choices.streams)


def _nothing(kind: str, members: dict[str, Any]) -> None:
    """Events are for streams."""


class _Events:
    """Writes the events of one stream."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._numbers = count()

    def __call__(self, kind: str, members: dict[str, Any]) -> None:
        content = ResponseEvent(type=kind, sequence_number=next(self._numbers), **members)
        self._outbox.write(named_event(kind, content))


class _Response:
    """One response. It repeats parts of its request, so it may be as long as a request."""

    def __init__(self, request: ResponsesRequest, model: str) -> None:
        repeated = request.model_dump(by_alias=True, exclude=_NOT_REPEATED)
        self.id = new_id("resp")
        self._members = repeated | {
            "id": self.id,
            "created_at": int(time()),
            "model": model,
            "metadata": request.metadata or {},
            "tools": repeated["tools"] or [],
            "tool_choice": repeated["tool_choice"] or "auto",
            "text": repeated["text"] or {"format": {"type": "text"}},
        }

    def shown(
        self,
        status: Status,
        output: Sequence[Any] = (),
        usage: ResponseUsage | None = None,
        reason: str | None = None,
    ) -> ResponseObject:
        """Returns OpenAI's object of the response.

        reason: why it is incomplete. OpenAI has none for a call that a stop sequence cut off.
        """
        details = None if reason is None else IncompleteDetails(reason=reason)
        return ResponseObject(
            status=status, incomplete_details=details, output=list(output), usage=usage, **self._members
        )


def _usage(choices: ChatChoices, items: ResponseItems) -> ResponseUsage:
    (stream,) = choices.streams
    return ResponseUsage(
        input_tokens=stream.input_length,
        input_tokens_details=InputTokensDetails(cached_tokens=stream.cached_tokens),
        output_tokens=stream.generated_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=items.thoughts),
        total_tokens=stream.input_length + stream.generated_tokens,
    )
