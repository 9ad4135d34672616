"""/v1/responses, and /v1/embeddings, which is refused by name."""

import json
from itertools import count
from time import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.router.api.access import tenant_of
from tgi_server.router.api.documentation import OPENAI_ERRORS, Responses, described_body, event_stream_of
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.requests import AllEnded, DirectRoute, Exchange, respond_to
from tgi_server.router.api.responses import json_response, named_event
from tgi_server.router.api.routes.chat import ChatChoices
from tgi_server.router.api.routes.chat_prompt import plan_chat, prompt_for_chat
from tgi_server.router.api.routes.response_items import ResponseItems
from tgi_server.router.api.routes.response_request import chat_request, input_messages, output_messages
from tgi_server.router.api.stored_responses import StoredResponses, new_id
from tgi_server.router.errors import NoSuchResponse, NotSupported, PreviousResponseNotFound
from tgi_server.router.schemas.openai import OpenAIErrorResponse, TextParameters
from tgi_server.router.schemas.responses import DeletedResponse, ResponseObject, ResponsesRequest
from tgi_server.router.service import Service

_KEPT_ERRORS: Responses = {
    401: OPENAI_ERRORS[401],
    404: {"description": "The response is not kept", "model": OpenAIErrorResponse},
}
# What a response does not repeat of its request.
_NOT_TOLD = {
    *("input", "include", "stream", "model", "chat_template_kwargs"),
    *(TextParameters.model_fields.keys() - {"temperature", "top_p"}),
}
_ID = {"parameters": [{"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}]}


def response_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)
    kept = StoredResponses(service.max_stored_responses)

    @router.post(
        "/v1/responses",
        summary="Respond to an input, in one piece or as server-sent events",
        response_model=ResponseObject,
        responses=OPENAI_ERRORS | event_stream_of(ResponseObject),
        openapi_extra=described_body(ResponsesRequest),
    )
    async def create(request: Request) -> Response:
        return await respond_to(service, request, ResponsesRequest, lambda *asked: _respond(kept, *asked))

    @router.get(
        "/v1/responses/{response_id}",
        summary="A response that is kept",
        response_model=ResponseObject,
        responses=_KEPT_ERRORS,
        openapi_extra=_ID,
    )
    async def retrieve(request: Request) -> Response:
        stored = kept.get(tenant_of(request), request.path_params["response_id"])
        return json_response(json.dumps(stored.response, ensure_ascii=False))

    @router.delete(
        "/v1/responses/{response_id}",
        summary="Forget a response",
        response_model=DeletedResponse,
        responses=_KEPT_ERRORS,
        openapi_extra=_ID,
    )
    async def delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        kept.delete(tenant_of(request), response_id)
        return json_response(json.dumps({"id": response_id, "object": "response.deleted", "deleted": True}))

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embed(request: Request) -> Response:
        raise NotSupported("this server has no embeddings: it serves a model that generates text")

    return router


async def _respond(kept: StoredResponses, exchange: Exchange, request: ResponsesRequest) -> Response:
    service, tenant = exchange.service, exchange.tenant
    messages = input_messages(request)
    if request.previous_response_id is not None:
        try:
            messages = [*kept.get(tenant, request.previous_response_id).messages, *messages]
        except NoSuchResponse as error:
            raise PreviousResponseNotFound(str(error)) from None
    plan = plan_chat(service, chat_request(request, messages), exchange.size)
    prompt = await prompt_for_chat(service, plan)
    told = _Response(request, prompt.checked.adapter_id or service.model.names[0])
    outbox = Outbox() if request.stream else None
    emit = _nothing if outbox is None else _Events(outbox)
    items = ResponseItems(emit)
    for kind in ("response.created", "response.in_progress"):
        emit(kind, {"response": told.json("in_progress", [], None)})

    def finish() -> dict[str, Any]:
        status = "incomplete" if items.incomplete else "completed"
        reason = "max_output_tokens" if items.reason == "length" else None
        response = told.json(status, items.items, _usage(choices, items), reason)
        if request.store:
            kept.add(tenant, response, [*messages, *output_messages(items.items)])
        return response

    def last_words() -> bytes:
        response = finish()
        emit(f"response.{response['status']}", {"response": response})
        return b""

    end = AllEnded(1) if outbox is None else exchange.stream_end(outbox, last_words=last_words)
    choices = ChatChoices.begin(exchange, plan, prompt, lambda _: items, end)
    if outbox is not None:
        return exchange.stream(outbox, characters=len(prompt.text))
    assert isinstance(end, AllEnded)
    await exchange.wait_for(end.future)
    text = json.dumps(finish(), ensure_ascii=False)
    return exchange.respond(text, characters=len(prompt.text), streams=choices.streams)


def _nothing(kind: str, members: dict[str, Any]) -> None:
    """Events are for streams."""


class _Events:
    """Writes the events of one stream."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._numbers = count()

    def __call__(self, kind: str, members: dict[str, Any]) -> None:
        content = {"type": kind, "sequence_number": next(self._numbers), **members}
        self._outbox.write(named_event(kind, json.dumps(content, ensure_ascii=False)))


class _Response:
    """One response, as far as the request tells of it."""

    def __init__(self, request: ResponsesRequest, model: str) -> None:
        asked = request.model_dump(by_alias=True, exclude=_NOT_TOLD)
        self._members = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time()),
            "background": False,
            "error": None,
            "model": model,
            "truncation": "disabled",
            **asked,
            "metadata": request.metadata or {},
            "tools": asked["tools"] or [],
            "tool_choice": asked["tool_choice"] or "auto",
            "text": asked["text"] or {"format": {"type": "text"}},
        }

    def json(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None, reason: str | None = None
    ) -> dict[str, Any]:
        """Returns OpenAI's object of the response. status: in_progress, completed or incomplete.

        reason: why it is incomplete. OpenAI has none for a call that a stop sequence cut off.
        """
        incomplete = {"reason": reason} if reason is not None else None
        told = {"status": status, "incomplete_details": incomplete, "output": output, "usage": usage}
        return {**self._members, **told}


def _usage(choices: ChatChoices, items: ResponseItems) -> dict[str, Any]:
    (stream,) = choices.streams
    return {
        "input_tokens": stream.input_length,
        "input_tokens_details": {"cached_tokens": stream.cached_tokens},
        "output_tokens": stream.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": items.thoughts},
        "total_tokens": stream.input_length + stream.generated_tokens,
    }
