"""/tokenize, /chat_tokenize, /detokenize and /tokenizer_info.

/tokenize responds in the form of the request: TGI's, or vLLM's.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Encoding

from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import REQUEST_ERRORS, DescribedRoute, answered_by
from tgi_server.router.api.encoding import json_response, to_json
from tgi_server.router.api.routes.chat_prompt import conversation_of, rendered
from tgi_server.router.api.routes.prompt_images import markdown_prompt
from tgi_server.router.api.values import respond_with_tokens
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
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.tokenizer_config import DEFAULT_TEMPLATE, TOKEN_NAMES

T = TypeVar("T")

# Maximum number of tokens in a response, or that of a prompt if it is larger.
MOST_TOKENS = 65_536


def tokenize_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, REQUEST_ERRORS)
    routes.receive("/tokenize", "The tokens of a prompt", AnyTokenizeRequest, _tokenize, "AnyTokenizeResponse")
    summary = "The prompt that a conversation becomes, and its tokens"
    routes.receive("/chat_tokenize", summary, ChatRequest, _tokenize_chat, ChatTokenizeResponse)
    routes.receive("/detokenize", "The text of tokens", DetokenizeRequest, _detokenize, DetokenizeResponse)

    settings = to_json(_tokenizer_info(service))

    async def tokenizer_info(_: Request) -> Response:
        return json_response(settings)

    summary = "The tokenizer's special tokens and chat template, as vLLM has them"
    responses = {401: REQUEST_ERRORS[401], **answered_by(TokenizerInfo)}
    return [*routes, DescribedRoute("/tokenizer_info", tokenizer_info, summary, responses)]


async def _tokenize(admission: Admission, request: AnyTokenizeRequest) -> Response:
    match request.root:
        case TokenizeRequest(inputs=inputs):
            prompt = await markdown_prompt(admission, inputs, "inputs")
            tokens = await encoded(admission.service, prompt, _shown, add_special_tokens=True)
            return await respond_with_tokens(admission, tokens, len(tokens))
        case asked:
            return await _vllm_tokens(admission, asked)


async def _tokenize_chat(admission: Admission, request: ChatRequest) -> Response:
    prompt = await _conversation(admission, request)
    tokens = await encoded(admission.service, prompt, _templated, add_special_tokens=False)
    return await respond_with_tokens(admission, tokens, len(tokens.tokenize_response))


async def _detokenize(admission: Admission, request: DetokenizeRequest) -> Response:
    service, ids = admission.service, request.tokens
    if len(ids) > (most := _most_tokens(service)):
        raise InvalidRequest.at("tokens", f"has {len(ids)} token ids; it may have at most {most}")
    text = await service.text.threads.handle_text(len(ids), lambda: _text(service, ids))
    return await respond_with_tokens(admission, DetokenizeResponse(prompt=text), len(ids))


async def encoded(
    service: Service, prompt: RenderedPrompt, shown: Callable[[str, Encoding], T], *, add_special_tokens: bool
) -> T:
    """Tokenizes a prompt. Returns the result of `shown` for its text and tokens. Raises InvalidRequest if too long."""
    most, tokenizer = _most_tokens(service), service.text.tokenizer

    def tokenize() -> T:
        if not tokenizer.exceeds(prompt.text, most):
            plain = tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)
            encoding = prompt.literally(plain)
            if len(encoding) <= most:
                return shown(prompt.text if encoding is plain else prompt.literal_text(), encoding)
        raise InvalidRequest(f"the text has more than {most} tokens; cut it into pieces, and ask for each")

    return await service.text.threads.handle_text(len(prompt.text), tokenize)


def token_count(_: str, encoding: Encoding) -> int:
    """Returns the number of tokens, for `encoded`."""
    return len(encoding)


async def _vllm_tokens(admission: Admission, asked: TokenizePromptRequest | TokenizeChatRequest) -> Response:
    service, tokenizer = admission.service, admission.service.text.tokenizer
    if isinstance(asked, TokenizeChatRequest):
        prompt = await _conversation(admission, asked)
    else:
        prompt = await markdown_prompt(admission, asked.prompt, "prompt")

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
    return await respond_with_tokens(admission, response, response.count)


async def _conversation(admission: Admission, asked: ChatRequest) -> RenderedPrompt:
    """Returns the prompt of a chat. Raises InvalidRequest."""
    return await rendered(admission, lambda: conversation_of(asked))


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
    """Returns the text of tokens. Raises InvalidRequest for an unknown token."""
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
