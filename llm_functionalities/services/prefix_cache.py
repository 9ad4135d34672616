"""`LLMPrefixCache`: lets endpoints compute prompts, and the beginnings of answers, before they are needed."""

from typing import Any

from llm_functionalities.endpoint.generation import GenerationParameters
from llm_functionalities.errors import InvalidArgument
from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient, generation_of, sampling_of
from llm_functionalities.services.numbers import json_question
from shared.stubs import llm_pb2, llm_pb2_grpc

LONGEST_TTL_SECONDS = 3600
LONGEST_KEY = 1024
MOST_ANSWER_TOKENS = 512


class LLMPrefixCache(llm_pb2_grpc.LLMPrefixCacheServicer):
    """The service LLMPrefixCache. Responds by the deadline, with counts of 0 if no model has computed the prompt."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def Warm(self, request: llm_pb2.WarmRequest, context: CallContext) -> llm_pb2.WarmResponse:
        _check(request)
        deadline = self._model.deadline(context, request.timeout)
        generation = generation_of(self._model, request)
        if not request.formatted_prompt:
            return llm_pb2.WarmResponse()
        endpoints = self._model.model.destinations(request.formatted_prompt, context.models)

        def ask(place: int) -> Question[llm_pb2.WarmResponse]:
            endpoint = endpoints[place] if endpoints else None
            body = _with_answer(request, generation) if request.answer_tokens else _body(request)
            return json_question("/v1/warm", body, _response, endpoint)

        count = max(1, len(endpoints))  # without an endpoint, one question still gives the reason for the metadata
        answers = await self._model.answers(context, count, ask, self._model.generation(0), deadline)
        return next((answer.value for answer in answers if answer.value is not None), llm_pb2.WarmResponse())


def _body(request: llm_pb2.WarmRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": request.formatted_prompt}
    body |= {"ttl_seconds": request.ttl_seconds} if request.ttl_seconds else {}
    body |= {"prompt_cache_key": request.cache_key} if request.cache_key else {}
    return body | ({"model": request.adapter_id} if request.adapter_id else {})


def _with_answer(request: llm_pb2.WarmRequest, generation: GenerationParameters) -> dict[str, Any]:
    """Returns the body for computing the prompt and the beginning of its answer, with the answer's parameters."""
    parameters = {name: value for name, value in generation.parameters().items() if value is not None}
    parameters |= {"prompt_cache_key": request.cache_key} if request.cache_key else {}
    body = {"inputs": request.formatted_prompt, "parameters": parameters, "answer_tokens": request.answer_tokens}
    return body | ({"ttl_seconds": request.ttl_seconds} if request.ttl_seconds else {})


def _response(response: dict[str, Any]) -> llm_pb2.WarmResponse:
    names = ("prompt_tokens", "cached_tokens", "answer_tokens")
    return llm_pb2.WarmResponse(**{name: response.get(name, 0) for name in names})


def _check(request: llm_pb2.WarmRequest) -> None:
    """Raises InvalidArgument, which names the field, if the request is invalid."""
    if not 0 <= request.ttl_seconds <= LONGEST_TTL_SECONDS:
        raise InvalidArgument(
            f"`ttl_seconds` is {request.ttl_seconds}; give 1 to {LONGEST_TTL_SECONDS}, or 0 for the default"
        )
    if len(request.cache_key) > LONGEST_KEY:
        raise InvalidArgument(
            f"`cache_key` has {len(request.cache_key)} characters; it must have at most {LONGEST_KEY}"
        )
    if not 0 <= request.answer_tokens <= MOST_ANSWER_TOKENS:
        raise InvalidArgument(f"`answer_tokens` is {request.answer_tokens}; give 0 to {MOST_ANSWER_TOKENS}")
    drawn = sampling_of(request.sampling).get("do_sample", False)
    if request.answer_tokens and drawn and not request.sampling.HasField("seed"):
        raise InvalidArgument("`answer_tokens` needs `sampling.seed`, or a `sampling.temperature` of 0")
