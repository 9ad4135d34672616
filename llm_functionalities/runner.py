"""`LLMRunner`: prompts as they are, and summaries."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from llm_functionalities.caller import Context, Front
from llm_functionalities.generation import Grammar
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
        text = await self._front.answer(context, request.formatted_prompt, generation, deadline)
        return llm_pb2.ModelResponse(text=text)

    async def batch_call_model(
        self, request: llm_pb2.ModelBatchRequest, context: Context
    ) -> llm_pb2.ModelBatchResponse:
        deadline = self._front.deadline(context, request.timeout)
        generation = self._front.generation(request.max_tokens, Grammar.of_request(request.grammar))
        texts = await self._front.answers(context, list(request.formatted_prompts), generation, deadline)
        return llm_pb2.ModelBatchResponse(text=texts)

    async def generate_summary(
        self, request: llm_pb2.TGISummaryRequest, context: Context
    ) -> llm_pb2.TGISummaryResponse:
        deadline = self._front.deadline(context)
        if not request.input_text.strip():
            return llm_pb2.TGISummaryResponse()
        prompt = alpaca(SUMMARISE, request.input_text)
        text = await self._front.answer(context, prompt, self._front.generation(0), deadline)
        return llm_pb2.TGISummaryResponse(summary_text=text)

    async def generate_summaries(
        self, request: llm_pb2.TGIMultipleSummaryRequest, context: Context
    ) -> llm_pb2.TGIMultipleSummaryResponse:
        deadline = self._front.deadline(context)
        prompts = [alpaca(SUMMARISE, text) if text.strip() else None for text in request.input_text]
        texts = await self._front.answers(context, prompts, self._front.generation(0), deadline)
        return llm_pb2.TGIMultipleSummaryResponse(summary_text=texts)

    async def stream_model(
        self, request: llm_pb2.ModelRequest, context: Context
    ) -> AsyncIterator[llm_pb2.ModelResponse]:
        deadline = self._front.deadline(context, request.timeout)
        generation = self._front.generation(request.max_tokens, Grammar.of_request(request.grammar))
        async with aclosing(self._front.pieces(context, request.formatted_prompt, generation, deadline)) as pieces:
            async for text in pieces:
                yield llm_pb2.ModelResponse(text=text)
