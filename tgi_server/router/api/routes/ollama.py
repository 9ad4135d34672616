"""/api/chat and /api/generate of Ollama's API."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.answers.reader import AnswerPart, Piece
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OLLAMA_ERRORS
from tgi_server.router.api.encoding import LINES, json_response, line
from tgi_server.router.api.event_stream import Outbox
from tgi_server.router.api.generation import AllEnded, RequestGeneration
from tgi_server.router.api.routes.chat import ChatChoices
from tgi_server.router.api.routes.chat_answer import WholeChoice, call_id, made_arguments
from tgi_server.router.api.routes.ollama_request import prepare_ollama, without_tag
from tgi_server.router.api.routes.openai import finish_reason, named_adapter
from tgi_server.router.schemas.chat import ChatCompletionLogprob
from tgi_server.router.schemas.ollama import (
    OllamaAnswer,
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
    OllamaMadeCall,
    OllamaMadeFunction,
    OllamaMessage,
)
from tgi_server.router.service import Service
from tgi_server.router.text.token_stream import AnyStream


def ollama_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OLLAMA_ERRORS)
    summary = "Answer a conversation, in one piece or as lines of JSON, for Ollama's clients"
    chat = OllamaChatResponse
    routes.receive("/api/chat", summary, OllamaChatRequest, _answer, chat, lines=chat)
    summary = "Answer a prompt, in one piece or as lines of JSON, for Ollama's clients"
    generate = OllamaGenerateResponse
    routes.receive("/api/generate", summary, OllamaGenerateRequest, _answer, generate, lines=generate)
    return routes


# Creates a piece of an answer from its text, its thoughts, its calls, and other members.
_Shape = Callable[..., OllamaAnswer]


def _chat_piece(text: str, thoughts: str, calls: Sequence[OllamaMadeCall], **members: Any) -> OllamaChatResponse:
    message = OllamaMessage(content=text, thinking=thoughts or UNSET, tool_calls=list(calls) or UNSET)
    return OllamaChatResponse(message=message, created_at=timestamp(), **members)


def _generate_piece(text: str, thoughts: str, _: Sequence[OllamaMadeCall], **members: Any) -> OllamaGenerateResponse:
    return OllamaGenerateResponse(response=text, thinking=thoughts or UNSET, created_at=timestamp(), **members)


def timestamp() -> str:
    """Returns the current time in the format of RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def _answer(admission: Admission, request: OllamaChatRequest | OllamaGenerateRequest) -> Response:
    service = admission.service
    shape: _Shape = _chat_piece if isinstance(request, OllamaChatRequest) else _generate_piece
    if not (request.messages if isinstance(request, OllamaChatRequest) else request.prompt):
        # Clients send an empty request to load a model.
        async with service.in_use():
            pass
        model = named_adapter(service, without_tag(service, request.model)) or service.model.names[0]
        loaded = shape("", "", (), model=model, done=True, done_reason="load")
        return json_response(loaded, admission.record.headers)
    conversation, prepared = await prepare_ollama(admission, request)
    generation = RequestGeneration(admission)
    model = prepared.options.adapter_id or service.model.names[0]
    if request.stream:
        outbox = Outbox(line(shape("", "", (), model=model)))
        lines = _Lines(outbox, shape, model)

        def last_words() -> bytes:
            return line(lines.last(**_ending(admission, choices.streams[0])))

        end = generation.stream_end(outbox, last_words=last_words)
        choices = ChatChoices.begin(generation, conversation, prepared, lambda _: lines, end)
        return generation.stream(outbox, characters=prepared.characters, media_type=LINES)
    all_ended, written = AllEnded(1), WholeChoice()
    choices = ChatChoices.begin(generation, conversation, prepared, lambda _: written, all_ended)
    await all_ended.future
    calls = [_made_call(index, *call) for index, call in enumerate(written.calls)]
    ending = _ending(admission, choices.streams[0])
    logprobs = written.logprobs or UNSET
    answer = shape(written.text, written.thoughts, calls, model=model, logprobs=logprobs, **ending)
    return generation.respond(answer, characters=prepared.characters, streams=choices.streams)


class _Lines:
    """Writes the pieces of an answer as lines. A call is one line, written once the call is complete."""

    def __init__(self, outbox: Outbox, shape: _Shape, model: str) -> None:
        self._outbox = outbox
        self._shape = shape
        self._model = model
        self._call: Piece | None = None
        self._arguments: list[str] = []
        self._logprobs: list[ChatCompletionLogprob] = []

    def piece(self, piece: Piece, logprobs: Sequence[ChatCompletionLogprob], reason: str | None) -> None:
        self._logprobs += logprobs
        match piece.part:
            case AnswerPart.CALL:
                self._end_call()
                self._call = piece
            case AnswerPart.ARGUMENTS:
                self._arguments.append(piece.text)
            case part:
                self._end_call()
                if piece.text:
                    texts = ("", piece.text) if part is AnswerPart.THOUGHT else (piece.text, "")
                    self._outbox.write(line(self._piece(*texts, ())))
        if reason is not None:
            self._end_call()

    def last(self, **ending: Any) -> OllamaAnswer:
        """Returns the last piece, which has no text."""
        return self._piece("", "", (), **ending)

    def _end_call(self) -> None:
        if self._call is not None:
            call = _made_call(self._call.call, self._call.text, "".join(self._arguments), self._call.id)
            self._call, self._arguments = None, []
            self._outbox.write(line(self._piece("", "", [call])))

    def _piece(self, text: str, thoughts: str, calls: Sequence[OllamaMadeCall], **members: Any) -> OllamaAnswer:
        logprobs, self._logprobs = self._logprobs or UNSET, []
        return self._shape(text, thoughts, calls, model=self._model, logprobs=logprobs, **members)


def _made_call(index: int, name: str, arguments: str, own: str) -> OllamaMadeCall:
    """Returns a call. own: the id that the model gave it; empty if it gave none."""
    function = OllamaMadeFunction(index=index, name=name, arguments=made_arguments(arguments))
    return OllamaMadeCall(id=own or call_id(), function=function)


def _ending(admission: Admission, stream: AnyStream) -> dict[str, Any]:
    """Returns the members of the last piece: finish reason, numbers of tokens, and durations in nanoseconds."""
    assert stream.finish_reason is not None
    return {
        "done": True,
        "done_reason": finish_reason(stream.finish_reason),
        "total_duration": nanoseconds(admission.record.total_time),
        "load_duration": 0,
        "prompt_eval_count": stream.input_length,
        "prompt_eval_duration": nanoseconds(stream.first_token_at - stream.started_at),
        "eval_count": stream.generated_tokens,
        "eval_duration": nanoseconds(stream.ended_at - stream.first_token_at),
    }


def nanoseconds(seconds: float) -> int:
    """Returns a duration in nanoseconds, at least 1, as clients divide by it."""
    return max(int(seconds * 1e9), 1)
