"""/tokenize, /chat_tokenize and /detokenize."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Encoding

from tgi_server.router.api.body import parse, read_beside_loop, read_body
from tgi_server.router.api.documentation import REQUEST_ERRORS, endpoint
from tgi_server.router.api.encoding import json_response
from tgi_server.router.api.exchange import DirectRoute, owner_of
from tgi_server.router.api.routes.chat_prompt import conversation_of, render, tools_of
from tgi_server.router.api.routes.prompt_images import markdown_prompt, with_images
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import ChatRequest, ChatTokenizeResponse
from tgi_server.router.schemas.generate import DetokenizeRequest, DetokenizeResponse, SimpleToken, TokenizeRequest
from tgi_server.router.service import Service
from tgi_server.router.text.special_tokens import RenderedPrompt

M = TypeVar("M", bound=BaseModel)

# Most tokens of one response, unless a prompt may have more.
MOST_TOKENS = 65_536


def tokenize_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/tokenize",
        summary="The tokens of a prompt",
        **endpoint(REQUEST_ERRORS, TokenizeRequest, "TokenizeResponse"),
    )
    async def tokenize(request: Request) -> Response:
        async with reading(service, request, TokenizeRequest) as (asked, _):
            if not asked.inputs:
                raise InvalidRequest("`inputs` must not be empty")
            prompt = await markdown_prompt(service, request, asked.inputs, "inputs")
            _, tokens = await tokens_of(service, prompt, add_special_tokens=True)
            return json_response(tokens)

    @router.post(
        "/chat_tokenize",
        summary="The prompt that a conversation becomes, and its tokens",
        **endpoint(REQUEST_ERRORS, ChatRequest, ChatTokenizeResponse),
    )
    async def chat_tokenize(request: Request) -> Response:
        async with reading(service, request, ChatRequest) as (asked, size):
            conversation = conversation_of(asked, tools_of(asked))
            prompt = await service.text.threads.run(size, lambda: render(service, conversation))
            prompt = await with_images(service, request, prompt, conversation.images)
            text, tokens = await tokens_of(service, prompt, add_special_tokens=False)
            return json_response(ChatTokenizeResponse(tokenize_response=tokens, templated_text=text))

    @router.post(
        "/detokenize",
        summary="The text of tokens",
        **endpoint(REQUEST_ERRORS, DetokenizeRequest, DetokenizeResponse),
    )
    async def detokenize(request: Request) -> Response:
        async with reading(service, request, DetokenizeRequest) as (asked, _):
            ids, most = asked.tokens, _most_tokens(service)
            if len(ids) > most:
                raise InvalidRequest(f"`tokens` has {len(ids)} token ids; it may have at most {most}")
            text = await service.text.threads.handle_text(len(ids), lambda: _text(service, ids))
            return json_response(DetokenizeResponse(prompt=text))

    return router


@asynccontextmanager
async def reading(service: Service, request: Request, model: type[M]) -> AsyncIterator[tuple[M, int]]:
    """Yields the request's body as `model`, and its bytes; meanwhile it has a place among those in flight.

    Raises InvalidRequest; Overloaded when as many are in flight as may be.
    """
    body = await read_body(request, service.policy.payload_limit)
    with service.capacity.places(1, owner_of(request)):
        yield await read_beside_loop(service.text.threads, body, partial(parse, model)), len(body)


async def tokens_of(
    service: Service, prompt: RenderedPrompt, *, add_special_tokens: bool
) -> tuple[str, list[SimpleToken]]:
    """Returns the prompt's text, and its tokens. Raises InvalidRequest when there are too many of them."""
    most = _most_tokens(service)

    def tokenize() -> tuple[str, list[SimpleToken]]:
        if not service.text.tokenizer.exceeds(prompt.text, most):
            encoding = service.text.tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)
            text, encoding = prompt.checked(encoding)
            if len(encoding) <= most:
                return text, _shown(encoding, text)
        raise InvalidRequest(f"the text has more than {most} tokens; cut it into pieces, and ask for each")

    return await service.text.threads.handle_text(len(prompt.text), tokenize)


def _most_tokens(service: Service) -> int:
    return max(MOST_TOKENS, service.limits.max_input_tokens)


def _text(service: Service, ids: Sequence[int]) -> str:
    """Returns the text of tokens. Raises InvalidRequest for a token that there is not."""
    vocabulary = service.text.tokenizer.vocab_size
    if (highest := max(ids, default=0)) >= vocabulary:
        raise InvalidRequest(f"`tokens` has {highest}; token ids are 0 to {vocabulary - 1}")
    return service.text.tokenizer.decode(ids)


def _shown(encoding: Encoding, text: str) -> list[SimpleToken]:
    return [
        SimpleToken(id=token_id, text=text[start:stop], start=start, stop=stop)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
