"""/tokenize, /chat_tokenize, /detokenize and /tokenizer_info.

/tokenize responds in the form of the request: TGI's, or vLLM's.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Encoding

from tgi_server.router.api.body import parse, parse_form, read_beside_loop, read_body
from tgi_server.router.api.documentation import REQUEST_ERRORS, answered_by, endpoint
from tgi_server.router.api.encoding import json_response, to_json
from tgi_server.router.api.exchange import DirectRoute, owner_of
from tgi_server.router.api.routes.chat_prompt import conversation_of, render, tools_of
from tgi_server.router.api.routes.prompt_images import markdown_prompt, with_images
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import ChatRequest, ChatTokenizeResponse
from tgi_server.router.schemas.generate import SimpleToken
from tgi_server.router.schemas.tokenize import (
    AnyTokenizeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizedPrompt,
    TokenizePromptRequest,
    TokenizeRequest,
    TokenizerInfo,
)
from tgi_server.router.service import Service
from tgi_server.router.text.conversation import Conversation
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.tokenizer_config import DEFAULT_TEMPLATE, TOKEN_NAMES

T = TypeVar("T")

_FORMS: dict[str, type[BaseModel]] = {
    "inputs": TokenizeRequest,
    "messages": TokenizeChatRequest,
    "prompt": TokenizePromptRequest,
}
# Most tokens of one response, unless a prompt may have more.
MOST_TOKENS = 65_536


def tokenize_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/tokenize",
        summary="The tokens of a prompt",
        **endpoint(REQUEST_ERRORS, AnyTokenizeRequest, "AnyTokenizeResponse"),
    )
    async def tokenize(request: Request) -> Response:
        async with reading(service, request, partial(parse_form, _FORMS)) as (asked, size):
            match asked:
                case TokenizeRequest():
                    return json_response(await _tgi_tokens(service, request, asked))
                case TokenizePromptRequest() | TokenizeChatRequest():
                    return json_response(await _vllm_tokens(service, request, asked, size))
                case other:
                    raise AssertionError(other)

    @router.post(
        "/chat_tokenize",
        summary="The prompt that a conversation becomes, and its tokens",
        **endpoint(REQUEST_ERRORS, ChatRequest, ChatTokenizeResponse),
    )
    async def chat_tokenize(request: Request) -> Response:
        async with reading(service, request, partial(parse, ChatRequest)) as (asked, size):
            prompt = await _conversation(service, request, asked, size)
            return json_response(await encoded(service, prompt, _templated, add_special_tokens=False))

    @router.post(
        "/detokenize",
        summary="The text of tokens",
        **endpoint(REQUEST_ERRORS, DetokenizeRequest, DetokenizeResponse),
    )
    async def detokenize(request: Request) -> Response:
        async with reading(service, request, partial(parse, DetokenizeRequest)) as (asked, _):
            ids, most = asked.tokens, _most_tokens(service)
            if len(ids) > most:
                raise InvalidRequest(f"`tokens` has {len(ids)} token ids; it may have at most {most}")
            text = await service.text.threads.handle_text(len(ids), lambda: _text(service, ids))
            return json_response(DetokenizeResponse(prompt=text))

    settings = to_json(_tokenizer_info(service))

    @router.get(
        "/tokenizer_info",
        summary="The tokenizer's special tokens and chat template, as vLLM has them",
        response_class=Response,
        responses={401: REQUEST_ERRORS[401], **answered_by(TokenizerInfo)},
    )
    async def tokenizer_info(_: Request) -> Response:
        return json_response(settings)

    return router


@asynccontextmanager
async def reading(service: Service, request: Request, read: Callable[[bytes], T]) -> AsyncIterator[tuple[T, int]]:
    """Yields what `read` makes of the request's body, and its bytes; meanwhile it has a place among those in flight.

    Raises InvalidRequest; Overloaded when as many are in flight as may be.
    """
    body = await read_body(request, service.policy.payload_limit)
    with service.capacity.places(1, owner_of(request)):
        yield await read_beside_loop(service.text.threads, body, read), len(body)


async def encoded(
    service: Service, prompt: RenderedPrompt, shown: Callable[[str, Encoding], T], *, add_special_tokens: bool
) -> T:
    """Returns what `shown` makes of a prompt and its tokens. Raises InvalidRequest when there are too many of them."""
    most, tokenizer = _most_tokens(service), service.text.tokenizer

    def tokenize() -> T:
        if not tokenizer.exceeds(prompt.text, most):
            text, encoding = prompt.checked(tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens))
            if len(encoding) <= most:
                return shown(text, encoding)
        raise InvalidRequest(f"the text has more than {most} tokens; cut it into pieces, and ask for each")

    return await service.text.threads.handle_text(len(prompt.text), tokenize)


def token_count(_: str, encoding: Encoding) -> int:
    """Returns the number of tokens, for `encoded`."""
    return len(encoding)


async def _tgi_tokens(service: Service, request: Request, asked: TokenizeRequest) -> list[SimpleToken]:
    if not asked.inputs:
        raise InvalidRequest("`inputs` must not be empty")
    prompt = await markdown_prompt(service, request, asked.inputs, "inputs")
    return await encoded(service, prompt, _shown, add_special_tokens=True)


async def _vllm_tokens(
    service: Service, request: Request, asked: TokenizePromptRequest | TokenizeChatRequest, size: int
) -> TokenizedPrompt:
    """size: bytes of the request."""
    tokenizer = service.text.tokenizer
    if isinstance(asked, TokenizeChatRequest):
        prompt = await _conversation(service, request, asked, size)
    else:
        prompt = await markdown_prompt(service, request, asked.prompt, "prompt")

    def response(_: str, encoding: Encoding) -> TokenizedPrompt:
        if asked.add_special_tokens:
            encoding = tokenizer.with_special_tokens(encoding)
        return TokenizedPrompt(
            count=len(encoding.ids),
            max_model_len=service.limits.max_total_tokens,
            tokens=encoding.ids,
            token_strs=list(map(tokenizer.piece, encoding.ids)) if asked.return_token_strs else None,
        )

    return await encoded(service, prompt, response, add_special_tokens=False)


async def _conversation(service: Service, request: Request, asked: ChatRequest, size: int) -> RenderedPrompt:
    """Returns the prompt of a chat. size: bytes of the request. Raises InvalidRequest."""

    def rendered() -> tuple[Conversation, RenderedPrompt]:
        conversation = conversation_of(asked, tools_of(asked))
        return conversation, render(service, conversation)

    conversation, prompt = await service.text.threads.run(size, rendered)
    return await with_images(service, request, prompt, conversation.images)


def _tokenizer_info(service: Service) -> TokenizerInfo:
    config, template = service.text.config, service.text.template
    return TokenizerInfo(
        tokenizer_class=config.tokenizer_class,
        **{name: config.tokens.get(name) for name in TOKEN_NAMES},
        add_bos_token=config.add_bos_token,
        add_eos_token=config.add_eos_token,
        chat_template=config.chat_templates.get(DEFAULT_TEMPLATE) or template.source or None,
    )


def _most_tokens(service: Service) -> int:
    return max(MOST_TOKENS, service.limits.max_input_tokens)


def _text(service: Service, ids: Sequence[int]) -> str:
    """Returns the text of tokens. Raises InvalidRequest for a token that there is not."""
    vocabulary = service.text.tokenizer.vocab_size
    if (highest := max(ids, default=0)) >= vocabulary:
        raise InvalidRequest(f"`tokens` has {highest}; token ids are 0 to {vocabulary - 1}")
    return service.text.tokenizer.decode(ids)


def _templated(text: str, encoding: Encoding) -> ChatTokenizeResponse:
    return ChatTokenizeResponse(tokenize_response=_shown(text, encoding), templated_text=text)


def _shown(text: str, encoding: Encoding) -> list[SimpleToken]:
    return [
        SimpleToken(id=token_id, text=text[start:stop], start=start, stop=stop)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
