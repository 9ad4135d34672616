"""`LLMRunner`: sends prompts to the model as they are, and summarises texts."""

from collections.abc import AsyncIterator, Callable
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

# Why an answer ends whose object is whole, whatever the model wrote after it.
_OBJECT_ENDED = "stop_sequence"


class LLMRunner(llm_pb2_grpc.LLMRunnerServicer):
    """Every method responds in time, with an empty text where the model has none."""

    def __init__(self, model: ModelClient, echo: PromptEcho) -> None:
        """echo: what answers repeat of prompts that are sent as they are."""
        self._model = model
        self._echo: PromptEcho = echo

    async def call_model(self, request: llm_pb2.ModelRequest, context: CallContext) -> llm_pb2.ModelResponse:
        deadline = self._model.deadline(context, request.timeout)
        generation = self._generation(request)

        ended: set[int] = set()

        def ask() -> Question[str]:
            return self._as_it_is(request.formatted_prompt, generation, partial(ended.add, 0))

        answer = await self._model.answer(context, ask, generation, deadline)
        generated = answer.generated
        return llm_pb2.ModelResponse(
            text=answer.value or "",
            finish_reason=_OBJECT_ENDED if ended else generated.finish_reason,
            prompt_tokens=generated.prompt_tokens,
            generated_tokens=generated.generated_tokens,
        )

    async def batch_call_model(
        self, request: llm_pb2.ModelBatchRequest, context: CallContext
    ) -> llm_pb2.ModelBatchResponse:
        deadline = self._model.deadline(context, request.timeout)
        generation = self._generation(request)
        prompts = request.formatted_prompts
        ended: set[int] = set()

        def ask(place: int) -> Question[str]:
            return self._as_it_is(prompts[place], generation, partial(ended.add, place))

        answers = await self._model.answers(context, len(prompts), ask, generation, deadline)
        generated = [answer.generated for answer in answers]
        return llm_pb2.ModelBatchResponse(
            text=[answer.value or "" for answer in answers],
            finish_reason=[
                _OBJECT_ENDED if place in ended else each.finish_reason for place, each in enumerate(generated)
            ],
            prompt_tokens=[each.prompt_tokens for each in generated],
            generated_tokens=[each.generated_tokens for each in generated],
        )

    async def generate_summary(
        self, request: llm_pb2.TGISummaryRequest, context: CallContext
    ) -> llm_pb2.TGISummaryResponse:
        deadline = self._model.deadline(context)
        ask = partial(_summary_of, request.input_text)
        answer = await self._model.answer(context, ask, self._model.generation(0), deadline)
        return llm_pb2.TGISummaryResponse(summary_text=answer.value or "")

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
            async for piece in pieces:
                part, generated = answer.add(piece.value or ""), piece.generated
                reason = _OBJECT_ENDED if answer.ended else generated.finish_reason
                if part or reason:
                    yield llm_pb2.ModelResponse(
                        text=part,
                        finish_reason=reason,
                        prompt_tokens=generated.prompt_tokens,
                        generated_tokens=generated.generated_tokens,
                    )
                if answer.ended:
                    return

    def _generation(self, request: llm_pb2.ModelRequest | llm_pb2.ModelBatchRequest) -> GenerationParameters:
        grammar = grammar_of(request.grammar)
        return self._model.generation(request.max_tokens, grammar, adapter_id=request.adapter_id)

    def _as_it_is(self, prompt: str, generation: GenerationParameters, on_ended: Callable[[], None]) -> Question[str]:
        """on_ended: called if the answer closes the object that the prompt began."""
        echoed = EchoedAnswer(prompt, self._echo, has_grammar=generation.grammar is not None)

        def parse(text: str) -> str:
            whole = echoed.whole(text)
            if echoed.ended:
                on_ended()
            return whole

        return Question(prompt, parse)


def _summary_of(text: str) -> Question[str]:
    return Question.verbatim(alpaca(SUMMARISE, text) if text.strip() else None)
