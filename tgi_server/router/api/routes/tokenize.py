"""/tokenize, /chat_tokenize, /detokenize and /tokenizer_info.

/tokenize responds in the form of the request: TGI's, or vLLM's.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Encoding

from tgi_server.router.api.documentation import REQUEST_ERRORS, answered_by, endpoint
from tgi_server.router.api.encoding import json_response, to_json
from tgi_server.router.api.exchange import DirectRoute, Exchange, respond_to
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
        return await respond_to(service, request, AnyTokenizeRequest, _tokenize)

    @router.post(
        "/chat_tokenize",
        summary="The prompt that a conversation becomes, and its tokens",
        **endpoint(REQUEST_ERRORS, ChatRequest, ChatTokenizeResponse),
    )
    async def chat_tokenize(request: Request) -> Response:
        return await respond_to(service, request, ChatRequest, _tokenize_chat)

    @router.post(
        "/detokenize",
        summary="The text of tokens",
        **endpoint(REQUEST_ERRORS, DetokenizeRequest, DetokenizeResponse),
    )
    async def detokenize(request: Request) -> Response:
        return await respond_to(service, request, DetokenizeRequest, _detokenize)

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


async def _tokenize(exchange: Exchange, request: AnyTokenizeRequest) -> Response:
    match request.root:
        case TokenizeRequest(inputs=inputs):
            prompt = await markdown_prompt(exchange.service, exchange.request, inputs, "inputs")
            tokens = await encoded(exchange.service, prompt, _shown, add_special_tokens=True)
            return await exchange.respond_with_tokens(tokens, len(tokens))
        case asked:
            return await _vllm_tokens(exchange, asked)


async def _tokenize_chat(exchange: Exchange, request: ChatRequest) -> Response:
    prompt = await _conversation(exchange, request)
    tokens = await encoded(exchange.service, prompt, _templated, add_special_tokens=False)
    return await exchange.respond_with_tokens(tokens, len(tokens.tokenize_response))


async def _detokenize(exchange: Exchange, request: DetokenizeRequest) -> Response:
    service, ids = exchange.service, request.tokens
    if len(ids) > (most := _most_tokens(service)):
        raise InvalidRequest.at("tokens", f"has {len(ids)} token ids; it may have at most {most}")
    text = await service.text.threads.handle_text(len(ids), lambda: _text(service, ids))
    return await exchange.respond_with_tokens(DetokenizeResponse(prompt=text), len(ids))


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


async def _vllm_tokens(exchange: Exchange, asked: TokenizePromptRequest | TokenizeChatRequest) -> Response:
    service, tokenizer = exchange.service, exchange.service.text.tokenizer
    if isinstance(asked, TokenizeChatRequest):
        prompt = await _conversation(exchange, asked)
    else:
        prompt = await markdown_prompt(service, exchange.request, asked.prompt, "prompt")

    def tokens(_: str, encoding: Encoding) -> TokenizedPrompt:
        if asked.add_special_tokens:
            encoding = tokenizer.with_special_tokens(encoding)
        return TokenizedPrompt(
            count=len(encoding.ids),
            max_model_len=service.limits.max_total_tokens,
            tokens=encoding.ids,
            token_strs=list(map(tokenizer.piece, encoding.ids)) if asked.return_token_strs else None,
        )

    response = await encoded(service, prompt, tokens, add_special_tokens=False)
    return await exchange.respond_with_tokens(response, response.count)


async def _conversation(exchange: Exchange, asked: ChatRequest) -> RenderedPrompt:
    """Returns the prompt of a chat. Raises InvalidRequest."""
    service = exchange.service

    def rendered() -> tuple[Conversation, RenderedPrompt]:
        conversation = conversation_of(asked, tools_of(asked))
        return conversation, render(service, conversation)

    conversation, prompt = await service.text.threads.run(exchange.size, rendered)
    return await with_images(service, exchange.request, prompt, conversation.images)


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
        raise InvalidRequest.at("tokens", f"has {highest}; token ids are 0 to {vocabulary - 1}")
    return service.text.tokenizer.decode(ids)


def _templated(text: str, encoding: Encoding) -> ChatTokenizeResponse:
    return ChatTokenizeResponse(tokenize_response=_shown(text, encoding), templated_text=text)


def _shown(text: str, encoding: Encoding) -> list[SimpleToken]:
    return [
        SimpleToken(id=token_id, text=text[start:stop], start=start, stop=stop)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
