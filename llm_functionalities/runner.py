"""`LLMRunner`: prompts as they are, and summaries."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from llm_functionalities.caller import Context, Front
from llm_functionalities.generation import Grammar
from llm_functionalities.model import Question
from llm_functionalities.prompts import alpaca
from shared.stubs import llm_pb2, llm_pb2_grpc

SUMMARISE = "Summarise the text in the input. Use at most three sentences, and nothing that the text does not say."


class LLMRunner(llm_pb2_grpc.LLMRunnerServicer):
    """Every method answers in time, with an empty text where the model has none."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def call_model(self, request: llm_pb2.ModelRequest, context: Context) -> llm_pb2.ModelResponse:
        deadline = self._front.deadline(context, request.timeout)
        generation = self._front.generation(request.max_tokens, Grammar.of_request(request.grammar))
        prompt = request.formatted_prompt
        text = await self._front.answer(context, lambda: Question.verbatim(prompt), generation, deadline)
        return llm_pb2.ModelResponse(text=text or "")

    async def batch_call_model(
        self, request: llm_pb2.ModelBatchRequest, context: Context
    ) -> llm_pb2.ModelBatchResponse:
        deadline = self._front.deadline(context, request.timeout)
        generation = self._front.generation(request.max_tokens, Grammar.of_request(request.grammar))
        prompts = request.formatted_prompts

        def ask(place: int) -> Question[str]:
            return Question.verbatim(prompts[place])

        answers = await self._front.answers(context, len(prompts), ask, generation, deadline)
        return llm_pb2.ModelBatchResponse(text=[answer.value or "" for answer in answers])

    async def generate_summary(
        self, request: llm_pb2.TGISummaryRequest, context: Context
    ) -> llm_pb2.TGISummaryResponse:
        deadline = self._front.deadline(context)
        ask = partial(_summary_of, request.input_text)
        text = await self._front.answer(context, ask, self._front.generation(0), deadline)
        return llm_pb2.TGISummaryResponse(summary_text=text or "")

    async def generate_summaries(
        self, request: llm_pb2.TGIMultipleSummaryRequest, context: Context
    ) -> llm_pb2.TGIMultipleSummaryResponse:
        deadline = self._front.deadline(context)
        texts = request.input_text

        def ask(place: int) -> Question[str]:
            return _summary_of(texts[place])

        answers = await self._front.answers(context, len(texts), ask, self._front.generation(0), deadline)
        return llm_pb2.TGIMultipleSummaryResponse(summary_text=[answer.value or "" for answer in answers])

    async def stream_model(
        self, request: llm_pb2.ModelRequest, context: Context
    ) -> AsyncIterator[llm_pb2.ModelResponse]:
        deadline = self._front.deadline(context, request.timeout)
        generation = self._front.generation(request.max_tokens, Grammar.of_request(request.grammar))
        async with aclosing(self._front.pieces(context, request.formatted_prompt, generation, deadline)) as pieces:
            async for text in pieces:
                yield llm_pb2.ModelResponse(text=text)


def _summary_of(text: str) -> Question[str]:
    return Question.verbatim(alpaca(SUMMARISE, text) if text.strip() else None)
