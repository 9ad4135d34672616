"""`LLMRunner`: sends prompts to the model as they are, and summarises texts."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from llm_functionalities.endpoint.generation import GenerationParameters
from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient, grammar_of
from llm_functionalities.services.echo import EchoedAnswer
from llm_functionalities.services.prompts import alpaca
from llm_functionalities.settings import PromptEcho
from shared.stubs import llm_pb2, llm_pb2_grpc

SUMMARISE = "Summarise the text in the input. Use at most three sentences, and nothing that the text does not say."


class LLMRunner(llm_pb2_grpc.LLMRunnerServicer):
    """Every method responds in time, with an empty text where the model has none."""

    def __init__(self, model: ModelClient, echo: PromptEcho) -> None:
        """echo: what answers repeat of prompts that are sent as they are."""
        self._model = model
        self._echo: PromptEcho = echo

    async def call_model(self, request: llm_pb2.ModelRequest, context: CallContext) -> llm_pb2.ModelResponse:
        deadline = self._model.deadline(context, request.timeout)
        generation = self._generation(request)

        def ask() -> Question[str]:
            return self._as_it_is(request.formatted_prompt, generation)

        text = await self._model.answer(context, ask, generation, deadline)
        return llm_pb2.ModelResponse(text=text or "")

    async def batch_call_model(
        self, request: llm_pb2.ModelBatchRequest, context: CallContext
    ) -> llm_pb2.ModelBatchResponse:
        deadline = self._model.deadline(context, request.timeout)
        generation = self._generation(request)
        prompts = request.formatted_prompts

        def ask(place: int) -> Question[str]:
            return self._as_it_is(prompts[place], generation)

        answers = await self._model.answers(context, len(prompts), ask, generation, deadline)
        return llm_pb2.ModelBatchResponse(text=[answer.value or "" for answer in answers])

    async def generate_summary(
        self, request: llm_pb2.TGISummaryRequest, context: CallContext
    ) -> llm_pb2.TGISummaryResponse:
        deadline = self._model.deadline(context)
        ask = partial(_summary_of, request.input_text)
        text = await self._model.answer(context, ask, self._model.generation(0), deadline)
        return llm_pb2.TGISummaryResponse(summary_text=text or "")

    async def generate_summaries(
        self, request: llm_pb2.TGIMultipleSummaryRequest, context: CallContext
    ) -> llm_pb2.TGIMultipleSummaryResponse:
        deadline = self._model.deadline(context)
        texts = request.input_text

        def ask(place: int) -> Question[str]:
            return _summary_of(texts[place])

        answers = await self._model.answers(context, len(texts), ask, self._model.generation(0), deadline)
        return llm_pb2.TGIMultipleSummaryResponse(summary_text=[answer.value or "" for answer in answers])

    async def stream_model(
        self, request: llm_pb2.ModelRequest, context: CallContext
    ) -> AsyncIterator[llm_pb2.ModelResponse]:
        deadline = self._model.deadline(context, request.timeout)
        generation = self._generation(request)
        prompt = request.formatted_prompt
        answer = EchoedAnswer(prompt, self._echo, has_grammar=generation.grammar is not None)
        async with aclosing(self._model.pieces(context, prompt, generation, deadline)) as pieces:
            async for text in pieces:
                if part := answer.add(text):
                    yield llm_pb2.ModelResponse(text=part)
                if answer.ended:
                    return

    def _generation(self, request: llm_pb2.ModelRequest | llm_pb2.ModelBatchRequest) -> GenerationParameters:
        grammar = grammar_of(request.grammar)
        return self._model.generation(request.max_tokens, grammar, adapter_id=request.adapter_id)

    def _as_it_is(self, prompt: str, generation: GenerationParameters) -> Question[str]:
        return Question(prompt, EchoedAnswer(prompt, self._echo, has_grammar=generation.grammar is not None).whole)


def _summary_of(text: str) -> Question[str]:
    return Question.verbatim(alpaca(SUMMARISE, text) if text.strip() else None)
