"""/v1/warm: computes a prompt, or its beginning, before it is needed, when nothing else is to be done."""

import hashlib
from array import array
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.contract import GenerationOptions, StoppingParameters
from tgi_server.router.api.documentation import OPENAI_ERRORS, endpoint
from tgi_server.router.api.exchange import AllEnded, DirectRoute, Exchange, respond_to
from tgi_server.router.api.routes.chat_prompt import plan_chat, prompt_for_chat
from tgi_server.router.api.routes.openai import openai_options
from tgi_server.router.api.routes.prompt_images import markdown_prompt
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.warm import WarmChatRequest, WarmCompletionRequest, WarmRequest, WarmResponse
from tgi_server.router.service import Service
from tgi_server.router.submission import KeptPrefix
from tgi_server.router.text.preparation import PreparedRequest
from tgi_server.router.text.token_stream import CollectedTokens

# No request is served after one of this class.
_LOWEST_PRIORITY = 2**31 - 1


def warm_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=DirectRoute)

    @router.post(
        "/v1/warm",
        summary="Compute a prompt, or its beginning, before it is needed",
        **endpoint(OPENAI_ERRORS, WarmRequest, WarmResponse),
    )
    async def warm(request: Request) -> Response:
        return await respond_to(service, request, WarmRequest, _warm)

    return router


async def _warm(exchange: Exchange, body: WarmRequest) -> Response:
    request = body.root
    if isinstance(request, WarmChatRequest):
        chat = await prompt_for_chat(exchange, lambda: plan_chat(exchange.service, request))
        characters, checked = len(chat.text), chat.checked
    else:
        characters, checked = await _completion(exchange, request)
    options = _cheapest(checked.options)
    prompt = replace(checked, options=options)
    name = options.prompt_cache_key or hashlib.sha256(array("I", prompt.input_ids).tobytes()).hexdigest()
    end = AllEnded(1)
    stream = exchange.generate(prompt, CollectedTokens(), end, keep=KeptPrefix(name, request.ttl_seconds))
    await exchange.wait_for(end.future)
    response = WarmResponse(
        prompt_tokens=stream.input_length, cached_tokens=stream.cached_tokens, ttl_seconds=request.ttl_seconds
    )
    return exchange.respond(response, characters=characters, streams=[stream])


async def _completion(exchange: Exchange, request: WarmCompletionRequest) -> tuple[int, PreparedRequest]:
    """Returns the characters of the prompt, and the prompt as tokens. Raises InvalidRequest."""
    service, prompts = exchange.service, request.prompt.root
    if len(prompts) != 1 or not isinstance(text := prompts[0], str):
        raise InvalidRequest.at("prompt", "must be one text")
    options = _cheapest(openai_options(service, request, Dialect.COMPLETIONS))
    return len(text), await service.preparer.prepare(
        await markdown_prompt(service, exchange.request, text, "prompt", options.cache_salt),
        options,
        Dialect.COMPLETIONS,
        client=exchange.owner,
        add_special_tokens=request.add_special_tokens,
        size=exchange.size,
    )


def _cheapest(options: GenerationOptions) -> GenerationOptions:
    """Returns the options of a request for one token, which nobody reads, served after all others."""
    return GenerationOptions(
        stopping=StoppingParameters(max_new_tokens=1, ignore_eos=True),
        truncate=options.truncate,
        cache_salt=options.cache_salt,
        adapter_id=options.adapter_id,
        timeout_ms=options.timeout_ms,
        prompt_cache_key=options.prompt_cache_key,
        priority=_LOWEST_PRIORITY,
    )
