"""/v1/responses."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from time import time
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.access import tenant_of
from tgi_server.router.api.admission import SMALL, Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS, DescribedRoute, Responses, answered_by, described
from tgi_server.router.api.encoding import json_response, named_event, to_json
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.generation import AllEnded, RequestGeneration
from tgi_server.router.api.routes.chat import ChatChoices
from tgi_server.router.api.routes.chat_prompt import Asked, prepare_chat, rendered
from tgi_server.router.api.routes.response_items import ResponseItems
from tgi_server.router.api.routes.response_request import (
    input_turns,
    output_turns,
    requested_response,
    requested_tools,
    resolved,
    response_conversation,
    shown_input,
    turns_from_json,
    turns_to_json,
)
from tgi_server.router.api.routes.tokenize import encoded, token_count
from tgi_server.router.api.values import respond_with_tokens
from tgi_server.router.errors import (
    InvalidRequest,
    NoSuchItem,
    NoSuchResponse,
    NotSupported,
    PayloadTooLarge,
    PreviousResponseNotFound,
)
from tgi_server.router.options import Dialect, rows
from tgi_server.router.schemas.base import ResponseModel
from tgi_server.router.schemas.openai import OpenAIErrorResponse
from tgi_server.router.schemas.response_input import ItemReference
from tgi_server.router.schemas.responses import (
    CountedInput,
    DeletedResponse,
    IncompleteDetails,
    InputItemList,
    InputTokensDetails,
    InputTokensRequest,
    OutputTokensDetails,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from tgi_server.router.service import Service
from tgi_server.router.stored_responses import StoredResponse, StoredResponses, new_id
from tgi_server.router.text.conversation import Conversation

_KEPT_ERRORS: Responses = {
    401: OPENAI_ERRORS[401],
    404: described("The response is not stored", OpenAIErrorResponse),
}
# Options of a request that its response repeats, and fields that it does not repeat.
_REPEATED = {"temperature", "top_p", "max_output_tokens", "top_logprobs"}
_NOT_REPEATED = {
    *("input", "include", "stream", "model", "chat_template_kwargs", "context_management"),
    *({name for row in rows(Dialect.RESPONSES) for name in row.names} - _REPEATED),
}
_LONGEST_PAGE = 100
Status = Literal["in_progress", "completed", "incomplete"]


def response_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    kept = service.stored or StoredResponses(service.policy.max_stored_responses)

    summary = "Respond to an input, in one piece or as server-sent events"
    routes.receive("/v1/responses", summary, ResponsesRequest, partial(_respond, kept), ResponseObject, ResponseEvent)

    async def retrieve(request: Request) -> Response:
        stored = kept.get(tenant_of(request), request.path_params["response_id"])
        return json_response(stored.response)

    async def input_items(request: Request) -> Response:
        stored = kept.get(tenant_of(request), request.path_params["response_id"])
        return json_response(_page(stored.input, request.query_params))

    summary = "The number of tokens that an input becomes"
    routes.receive("/v1/responses/input_tokens", summary, InputTokensRequest, partial(_count, kept), CountedInput)

    async def delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        kept.delete(tenant_of(request), response_id)
        return json_response(DeletedResponse(id=response_id))

    async def conversations(_: Request) -> Response:
        raise NotSupported("/v1/conversations is not supported here; use `previous_response_id` of /v1/responses")

    async def background(_: Request) -> Response:
        raise NotSupported("responses in the background are not supported here; close the connection to cancel one")

    def stored(path: str, endpoint: Any, summary: str, model: type[ResponseModel], method: str = "GET") -> Route:
        responses = _KEPT_ERRORS | answered_by(model)
        return DescribedRoute(f"/v1/responses/{{response_id}}{path}", endpoint, summary, responses, method=method)

    refused = ("/v1/conversations", "/v1/conversations/{rest:path}")
    return [
        *routes,
        stored("", retrieve, "A stored response", ResponseObject),
        stored("/input_items", input_items, "The items that a stored response answers", InputItemList),
        stored("", delete, "Forget a response", DeletedResponse, "DELETE"),
        *(Route(path, conversations, methods=["GET", "POST", "DELETE"]) for path in refused),
        Route("/v1/responses/{response_id}/cancel", background, methods=["POST"]),
    ]


async def _respond(kept: StoredResponses, admission: Admission, request: ResponsesRequest) -> Response:
    service, tenant = admission.service, admission.tenant
    earlier, referred = _stored(kept, tenant, request)
    admission.size += len(earlier) + sum(map(len, referred.values()))

    def prepare() -> tuple[bytes, dict[str, bytes], Asked, _Response]:
        items = resolved(request.items, referred)
        turns = input_turns([item.root for item in items])
        conversation = turns_to_json(earlier, turns)
        if len(conversation) > (most := service.policy.payload_limit):
            raise PayloadTooLarge(f"the conversation has more than {most} bytes (--payload-limit); begin another one")
        offered = requested_tools(request, items)
        asked = requested_response(admission, request, [*turns_from_json(earlier), *turns], offered)
        shown = shown_input(items) if request.store else {}
        return conversation, shown, asked, _Response(request, asked[1].adapter_id or service.model.names[0])

    turns, given, asked, response = await service.text.threads.handle_text(admission.size, prepare, at_once=SMALL)
    conversation, prepared = await prepare_chat(admission, Dialect.RESPONSES, lambda: asked)
    outbox = Outbox() if request.stream else None
    emit = _nothing if outbox is None else _Events(outbox)
    items = ResponseItems(emit, conversation.use.client_tools)
    for kind in ("response.created", "response.in_progress"):
        emit(kind, {"response": response.shown("in_progress")})

    def finish() -> tuple[Status, ResponseObject]:
        """Stores the response. Returns its status and the response."""
        status: Status = "incomplete" if items.incomplete else "completed"
        reason = "max_output_tokens" if items.reason == "length" else None
        shown = response.shown(status, items.shown(), _usage(choices, items), reason)
        if request.store:
            whole = turns_to_json(turns, output_turns(items.items))
            output = {item.id: to_json(item) for item in shown.output}
            kept.add(tenant, response.id, StoredResponse(to_json(shown), whole, given, output))
        return status, shown

    def last_words() -> bytes:
        status, shown = finish()
        emit(f"response.{status}", {"response": shown})
        return b""

    generation = RequestGeneration(admission)
    end = AllEnded(1) if outbox is None else generation.stream_end(outbox, last_words=last_words)
    choices = ChatChoices.begin(generation, conversation, prepared, lambda _: items, end)
    if outbox is not None:
        return generation.stream(outbox, characters=prepared.characters, collects=True)
    assert isinstance(end, AllEnded)
    await end.future
    return generation.respond(finish()[1], characters=prepared.characters, streams=choices.streams)


def _stored(kept: StoredResponses, tenant: str, request: ResponsesRequest) -> tuple[bytes, dict[str, bytes]]:
    """Returns the turns before the input, and the stored items that the input refers to, by id; all as JSON.

    Raises PreviousResponseNotFound, or NoSuchItem.
    """
    earlier = b""
    if request.previous_response_id is not None:
        try:
            earlier = kept.get(tenant, request.previous_response_id).turns
        except NoSuchResponse as error:
            raise PreviousResponseNotFound(str(error), param="previous_response_id") from None
    references = (item.root.id for item in request.items if isinstance(item.root, ItemReference))
    return earlier, {item_id: kept.item(tenant, item_id) for item_id in references}


async def _count(kept: StoredResponses, admission: Admission, request: InputTokensRequest) -> Response:
    """Responds with the number of tokens of the prompt."""
    earlier, referred = _stored(kept, admission.tenant, request)
    admission.size += len(earlier) + sum(map(len, referred.values()))

    def conversation() -> Conversation:
        items = resolved(request.items, referred)
        use = requested_tools(request, items).use(request)
        turns = [*turns_from_json(earlier), *input_turns([item.root for item in items])]
        return response_conversation(request, turns, use)

    prompt = await rendered(admission, conversation)
    tokens = await encoded(admission.service, prompt, token_count, add_special_tokens=False)
    return await respond_with_tokens(admission, CountedInput(input_tokens=tokens), tokens)


def _page(items: Mapping[str, bytes], query: Mapping[str, str]) -> InputItemList:
    """Returns a page of the items of an input, by default in reverse order. Raises InvalidRequest."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= _LONGEST_PAGE):
        raise InvalidRequest.at("limit", f"is {limit[:20]!r}; it must be 1 to {_LONGEST_PAGE}")
    if order not in ("asc", "desc"):
        raise InvalidRequest.at("order", f"is {order[:20]!r}; it must be asc or desc")
    names = list(items) if order == "asc" else list(items)[::-1]
    if after is not None and after not in items:
        raise NoSuchItem(after)
    rest = names[names.index(after) + 1 :] if after is not None else names
    page = rest[: int(limit)]
    return InputItemList(
        data=[msgspec.Raw(items[name]) for name in page],
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
        has_more=len(rest) > len(page),
    )


def _nothing(kind: str, members: dict[str, Any]) -> None:
    """Ignores an event of a response that is not streamed."""


class _Events:
    """Writes the events of one stream."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._numbers = count()

    def __call__(self, kind: str, members: dict[str, Any]) -> None:
        content = ResponseEvent(type=kind, sequence_number=next(self._numbers), **members)
        self._outbox.write(named_event(kind, content))


class _Response:
    """Creates the object of one response, which repeats parts of its request."""

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

        reason: why it is incomplete; None also for a call that a stop sequence cut off, as OpenAI has no reason for it.
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
