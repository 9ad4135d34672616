"""`LLMPrefixCache`: computes prompts before they are needed, where they will be needed."""

from typing import Any

from llm_functionalities.errors import InvalidArgument
from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.numbers import json_question
from shared.stubs import llm_pb2, llm_pb2_grpc

LONGEST_TTL_SECONDS = 3600
LONGEST_KEY = 1024


class LLMPrefixCache(llm_pb2_grpc.LLMPrefixCacheServicer):
    """Responds in time, without counts where no model has computed the prompt."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def Warm(self, request: llm_pb2.WarmRequest, context: CallContext) -> llm_pb2.WarmResponse:
        _check(request)
        deadline = self._model.deadline(context, request.timeout)
        if not request.formatted_prompt:
            return llm_pb2.WarmResponse()
        endpoints = self._model.model.destinations(request.formatted_prompt)

        def ask(place: int) -> Question[llm_pb2.WarmResponse]:
            endpoint = endpoints[place] if endpoints else None
            return json_question("/v1/warm", _body(request), _response, endpoint)

        count = max(1, len(endpoints))  # without an endpoint the answer is the reason
        answers = await self._model.answers(context, count, ask, self._model.generation(0), deadline)
        return next((each.value for each in answers if each.value is not None), llm_pb2.WarmResponse())


def _body(request: llm_pb2.WarmRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": request.formatted_prompt}
    body |= {"ttl_seconds": request.ttl_seconds} if request.ttl_seconds else {}
    body |= {"prompt_cache_key": request.cache_key} if request.cache_key else {}
    return body | ({"model": request.adapter_id} if request.adapter_id else {})


def _response(response: dict[str, Any]) -> llm_pb2.WarmResponse:
    return llm_pb2.WarmResponse(prompt_tokens=response["prompt_tokens"], cached_tokens=response["cached_tokens"])


def _check(request: llm_pb2.WarmRequest) -> None:
    """Raises InvalidArgument, which names the field."""
    if not 0 <= request.ttl_seconds <= LONGEST_TTL_SECONDS:
        raise InvalidArgument(
            f"`ttl_seconds` is {request.ttl_seconds}; give 1 to {LONGEST_TTL_SECONDS}, or 0 for the default"
        )
    if len(request.cache_key) > LONGEST_KEY:
        raise InvalidArgument(
            f"`cache_key` has {len(request.cache_key)} characters; it must have at most {LONGEST_KEY}"
        )
