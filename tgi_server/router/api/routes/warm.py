"""/v1/warm computes a prompt, or its beginning, before it is needed; /v1/forget has nothing cached of a salt."""

import hashlib
from array import array
from dataclasses import replace

from starlette.responses import Response
from starlette.routing import Route

from tgi_server.contract import GenerationOptions, StoppingParameters
from tgi_server.router.api.access import cache_namespace
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS
from tgi_server.router.api.generation import AllEnded, RequestGeneration
from tgi_server.router.api.routes.chat_prompt import prepare_chat, requested_chat
from tgi_server.router.api.routes.openai import openai_options
from tgi_server.router.api.routes.prompt_images import markdown_prompt
from tgi_server.router.api.values import respond_with_tokens
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.warm import (
    ForgetRequest,
    ForgetResponse,
    WarmChatRequest,
    WarmCompletionRequest,
    WarmRequest,
    WarmResponse,
)
from tgi_server.router.service import Service
from tgi_server.router.submission import KeptPrefix, PreparedRequest
from tgi_server.router.text.token_stream import CollectedTokens

# No request is served after one of this class.
_LOWEST_PRIORITY = 2**31 - 1


def warm_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    summary = "Compute a prompt, or its beginning, before it is needed"
    routes.receive("/v1/warm", summary, WarmRequest, _warm, WarmResponse)
    summary = "Forget all that is cached, in memory and on disk, of prompts and answers with a cache_salt"
    routes.receive("/v1/forget", summary, ForgetRequest, _forget, ForgetResponse)
    return routes


async def _warm(admission: Admission, body: WarmRequest) -> Response:
    request = body.root
    if isinstance(request, WarmChatRequest):
        _, prepared = await prepare_chat(admission, Dialect.CHAT, lambda: requested_chat(admission, request))
    else:
        prepared = await _completion(admission, request)
    options = _cheapest(prepared.options)
    name = options.prompt_cache_key or hashlib.sha256(array("I", prepared.input_ids).tobytes()).hexdigest()
    generation, end = RequestGeneration(admission), AllEnded(1)
    keep = KeptPrefix(name, request.ttl_seconds)
    stream = generation.begin(replace(prepared, options=options), CollectedTokens(), end, keep=keep)
    await generation.wait_for(end)
    response = WarmResponse(
        prompt_tokens=stream.input_length, cached_tokens=stream.cached_tokens, ttl_seconds=request.ttl_seconds
    )
    return generation.respond(response, characters=prepared.characters, streams=[stream])


async def _forget(admission: Admission, body: ForgetRequest) -> Response:
    """Forgets what requests with the same API key have left; those that run leave something when they end."""
    files = await admission.service.forget(cache_namespace(admission.tenant, body.cache_salt))
    return await respond_with_tokens(admission, ForgetResponse(files=files), 0)


async def _completion(admission: Admission, request: WarmCompletionRequest) -> PreparedRequest:
    """Returns the prompt as tokens. Raises InvalidRequest."""
    service, prompts = admission.service, request.prompt.root
    if len(prompts) != 1 or not isinstance(text := prompts[0], str):
        raise InvalidRequest.at("prompt", "must be one text")
    options = _cheapest(openai_options(admission, request, Dialect.COMPLETIONS))
    return await service.preparer.prepare(
        await markdown_prompt(admission, text, "prompt", options.cache_salt),
        options,
        Dialect.COMPLETIONS,
        client=admission.owner,
        add_special_tokens=request.add_special_tokens,
        size=admission.size,
    )


def _cheapest(options: GenerationOptions) -> GenerationOptions:
    """Returns the options of a request for one token, which is not used, served after all others."""
    return GenerationOptions(
        stopping=StoppingParameters(max_new_tokens=1, ignore_eos=True),
        truncate=options.truncate,
        cache_salt=options.cache_salt,
        adapter_id=options.adapter_id,
        timeout_ms=options.timeout_ms,
        prompt_cache_key=options.prompt_cache_key,
        priority=_LOWEST_PRIORITY,
    )
