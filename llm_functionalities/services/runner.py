"""`LLMRunner`: sends prompts to the model as they are, and summarizes texts."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from llm_functionalities.errors import InvalidArgument
from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient, generation_of
from llm_functionalities.services.echo import EchoedAnswer
from llm_functionalities.services.prompts import alpaca, with_images
from llm_functionalities.settings import PromptEcho
from shared.partial_json import Member, MemberReader
from shared.stubs import llm_pb2, llm_pb2_grpc

SUMMARISE = "Summarise the text in the input. Use at most three sentences, and nothing that the text does not say."

# The finish reason of an answer that is cut after the object that its prompt began.
_OBJECT_ENDED = "stop_sequence"


class LLMRunner(llm_pb2_grpc.LLMRunnerServicer):
    """The service LLMRunner. Every method responds by the deadline, with an empty text if the model gives none."""

    def __init__(self, model: ModelClient, echo: PromptEcho) -> None:
        """echo: the part of the prompt that answers repeat; summaries repeat nothing."""
        self._model = model
        self._echo: PromptEcho = echo

    async def call_model(self, request: llm_pb2.ModelRequest, context: CallContext) -> llm_pb2.ModelResponse:
        if request.members:
            raise InvalidArgument("`members` is for stream_model; leave it out")
        (response,) = await self._responses(request, [request.formatted_prompt], context, request.images)
        return response

    async def batch_call_model(
        self, request: llm_pb2.ModelBatchRequest, context: CallContext
    ) -> llm_pb2.ModelBatchResponse:
        responses = await self._responses(request, request.formatted_prompts, context)
        return llm_pb2.ModelBatchResponse(
            text=[response.text for response in responses],
            finish_reason=[response.finish_reason for response in responses],
            prompt_tokens=[response.prompt_tokens for response in responses],
            generated_tokens=[response.generated_tokens for response in responses],
        )

    async def generate_summary(
        self, request: llm_pb2.TGISummaryRequest, context: CallContext
    ) -> llm_pb2.TGISummaryResponse:
        (text,) = await self._summaries([request.input_text], context)
        return llm_pb2.TGISummaryResponse(summary_text=text)

    async def generate_summaries(
        self, request: llm_pb2.TGIMultipleSummaryRequest, context: CallContext
    ) -> llm_pb2.TGIMultipleSummaryResponse:
        return llm_pb2.TGIMultipleSummaryResponse(summary_text=await self._summaries(request.input_text, context))

    async def stream_model(
        self, request: llm_pb2.ModelRequest, context: CallContext
    ) -> AsyncIterator[llm_pb2.ModelResponse]:
        deadline = self._model.deadline(context, request.timeout)
        generation = generation_of(self._model, request)
        prompt = with_images(request.images, request.formatted_prompt)
        if request.members and not request.grammar.json_schema:
            raise InvalidArgument("`members` needs an answer in JSON; give `grammar.json_schema`")
        members = MemberReader() if request.members else None
        answer = EchoedAnswer(request.formatted_prompt, self._echo, has_grammar=generation.grammar is not None)
        async with aclosing(self._model.pieces(context, prompt, generation, deadline)) as pieces:
            async for piece in pieces:
                part, generated = answer.add(piece.value or ""), piece.generated
                reason = _OBJECT_ENDED if answer.ended else generated.finish_reason
                responses = [llm_pb2.ModelResponse(text=part)] if part or reason else []
                if members is not None:
                    responses += [llm_pb2.ModelResponse(member=_member(each)) for each in members.read(part)]
                for response in responses:
                    if response is responses[-1]:
                        response.finish_reason = reason
                        response.prompt_tokens = generated.prompt_tokens
                        response.generated_tokens = generated.generated_tokens
                    yield response
                if answer.ended:
                    return

    async def _responses(
        self,
        request: llm_pb2.ModelRequest | llm_pb2.ModelBatchRequest,
        prompts: Sequence[str],
        context: CallContext,
        images: Sequence[bytes] = (),
    ) -> list[llm_pb2.ModelResponse]:
        """Sends each prompt without changes, after the images, and returns the responses in order."""
        deadline = self._model.deadline(context, request.timeout)
        generation = generation_of(self._model, request)
        # The numbers of the prompts whose answers complete the object that the prompt began.
        ended: set[int] = set()

        def ask(place: int) -> Question[str]:
            echoed = EchoedAnswer(prompts[place], self._echo, has_grammar=generation.grammar is not None)

            def parse(text: str) -> str:
                whole = echoed.whole(text)
                if echoed.ended:
                    ended.add(place)
                return whole

            return Question(with_images(images, prompts[place]), parse)

        answers = await self._model.answers(context, len(prompts), ask, generation, deadline)
        return [
            llm_pb2.ModelResponse(
                text=answer.value or "",
                finish_reason=_OBJECT_ENDED if place in ended else answer.generated.finish_reason,
                prompt_tokens=answer.generated.prompt_tokens,
                generated_tokens=answer.generated.generated_tokens,
            )
            for place, answer in enumerate(answers)
        ]

    async def _summaries(self, texts: Sequence[str], context: CallContext) -> list[str]:
        def ask(place: int) -> Question[str]:
            return Question.verbatim(alpaca(SUMMARISE, texts[place]) if texts[place].strip() else None)

        deadline = self._model.deadline(context)
        answers = await self._model.answers(context, len(texts), ask, self._model.generation(0), deadline)
        return [answer.value or "" for answer in answers]


def _member(member: Member) -> llm_pb2.Member:
    """Returns a member as a gRPC message, with lone surrogates in its name replaced."""
    return llm_pb2.Member(name=json.loads(member.name).encode(errors="replace").decode(), value=member.value)
