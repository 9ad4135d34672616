"""/v1/warm computes a prompt, or its beginning, and optionally the beginning of its answer, before they are needed.

/v1/forget deletes everything that is cached for a salt.
"""

import hashlib
from array import array
from contextlib import suppress
from dataclasses import replace

from starlette.responses import Response
from starlette.routing import Route

from tgi_server.contract import GenerationOptions, StoppingParameters
from tgi_server.router.api.access import cache_namespace
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS
from tgi_server.router.api.generation import AllEnded, RequestGeneration
from tgi_server.router.api.routes.chat_prompt import prepare_chat, requested_chat
from tgi_server.router.api.routes.completions import plan_completions
from tgi_server.router.api.routes.generate import prepare_tgi, with_logprobs
from tgi_server.router.api.routes.openai import openai_options
from tgi_server.router.api.routes.prompt_images import markdown_prompt
from tgi_server.router.api.values import respond_with_tokens
from tgi_server.router.errors import InvalidRequest, Superseded
from tgi_server.router.option_reader import Given
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.warm import (
    ForgetRequest,
    ForgetResponse,
    WarmChatRequest,
    WarmCompletionRequest,
    WarmGenerateRequest,
    WarmRequest,
    WarmResponse,
)
from tgi_server.router.service import Service
from tgi_server.router.submission import KeptPrefix, PreparedRequest
from tgi_server.router.text.token_stream import CollectedTokens

_AnyRequest = WarmChatRequest | WarmCompletionRequest | WarmGenerateRequest

_ANSWER_TOKENS = "answer_tokens"
# The class that is served last.
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
    prepared = await _prepared(admission, request)
    if request.answer_tokens:
        _check_answer(admission, request, prepared.options)
        options = replace(prepared.options, priority=_LOWEST_PRIORITY, on_timeout=None)
    else:
        options = _cheapest(prepared.options)
    name = options.prompt_cache_key or hashlib.sha256(array("I", prepared.input_ids).tobytes()).hexdigest()
    generation, end = RequestGeneration(admission), AllEnded(1)
    stream = generation.begin(
        replace(prepared, options=options, early_tokens=request.answer_tokens),
        CollectedTokens(),
        end,
        keep=KeptPrefix(name, request.ttl_seconds),
    )
    with suppress(Superseded):
        await end.future
    response = WarmResponse(
        prompt_tokens=stream.input_length,
        cached_tokens=stream.cached_tokens,
        ttl_seconds=request.ttl_seconds,
        answer_tokens=stream.generated_tokens if request.answer_tokens else 0,
    )
    return generation.respond(response, characters=prepared.characters, streams=[stream])


async def _forget(admission: Admission, body: ForgetRequest) -> Response:
    """Deletes what requests with the same API key and salt have cached. Running ones still cache theirs at the end."""
    namespace = cache_namespace(admission.tenant, body.cache_salt)
    admission.service.explained.forget(namespace)
    files = await admission.service.forget(namespace)
    return await respond_with_tokens(admission, ForgetResponse(files=files), 0)


async def _prepared(admission: Admission, request: _AnyRequest) -> PreparedRequest:
    """Prepares the request, without options of the answer if none is generated. Raises InvalidRequest."""
    if isinstance(request, WarmChatRequest):
        _, prepared = await prepare_chat(admission, Dialect.CHAT, lambda: requested_chat(admission, request))
        return prepared
    if isinstance(request, WarmGenerateRequest):
        prepared = await prepare_tgi(admission, request.inputs, request.parameters, request.cache_salt)
        return with_logprobs(prepared, logprobs=True)  # streams have them
    service, prompts = admission.service, request.prompt.root
    if len(prompts) != 1 or not isinstance(text := prompts[0], str):
        raise InvalidRequest.at("prompt", "must be one text")
    if request.answer_tokens:
        return (await plan_completions(admission, request)).sequences[0]
    options = _cheapest(openai_options(admission, request, Dialect.COMPLETIONS))
    return await service.preparer.prepare(
        await markdown_prompt(admission, text, "prompt", options.cache_salt),
        options,
        Dialect.COMPLETIONS,
        client=admission.owner,
        add_special_tokens=request.add_special_tokens,
        size=admission.size,
    )


def _check_answer(admission: Admission, request: _AnyRequest, options: GenerationOptions) -> None:
    """Raises InvalidRequest if a later answer to the same request might differ, or there is more than one."""
    if not admission.service.caches:
        raise InvalidRequest.at(_ANSWER_TOKENS, "cannot be used: this server has no prefix cache for this model")
    if isinstance(request, WarmGenerateRequest):
        given, dialect = Given.by(request.parameters, Dialect.TGI), Dialect.TGI
    else:
        dialect = Dialect.CHAT if isinstance(request, WarmChatRequest) else Dialect.COMPLETIONS
        given = Given.by(request, dialect)
    seed = given.values.get("seed")
    if options.sampling.do_sample and (seed is None or (seed == -1 and dialect is not Dialect.TGI)):
        greedy = "without sampling" if dialect is Dialect.TGI else "a `temperature` of 0"
        raise InvalidRequest.at(_ANSWER_TOKENS, f"needs {greedy}, or a `seed`: another draw would be another answer")
    if options.n > 1 or options.best_of > 1:
        raise InvalidRequest.at(_ANSWER_TOKENS, "cannot be used with several answers: leave out `n` and `best_of`")
    if options.report.prefill_logprobs:
        raise InvalidRequest.at(_ANSWER_TOKENS, "cannot be used with log-probabilities of the prompt")


def _cheapest(options: GenerationOptions) -> GenerationOptions:
    """Returns the options of a request for one token, which is not used, with the lowest priority."""
    return GenerationOptions(
        stopping=StoppingParameters(max_new_tokens=1, ignore_eos=True),
        truncate=options.truncate,
        cache_salt=options.cache_salt,
        adapter_id=options.adapter_id,
        timeout_ms=options.timeout_ms,
        prompt_cache_key=options.prompt_cache_key,
        priority=_LOWEST_PRIORITY,
    )
