"""`LLMDecisions` and `LLMEmbeddings`: calls whose answers are numbers, not texts."""

import json
import sys
from array import array
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.errors import InvalidArgument
from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.prompts import data_url
from shared.stubs import llm_pb2, llm_pb2_grpc

DECISIONS = "/v1/decisions"
MOST_TEXTS = 2048
# Texts per request to a model server. A response with embeddings of 8,192 numbers has less than 3 MiB.
PIECE_TEXTS = 64

T = TypeVar("T")


class LLMDecisions(llm_pb2_grpc.LLMDecisionsServicer):
    """The service LLMDecisions. Responds by the deadline, without answers if the model gives none."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def Decide(self, request: llm_pb2.DecisionRequest, context: CallContext) -> llm_pb2.DecisionResponse:
        _check_decision(request)

        def parse(response: dict[str, Any]) -> llm_pb2.DecisionResponse:
            answers = zip(request.questions, response["answers"], strict=True)
            return llm_pb2.DecisionResponse(answers=[_answer(*answer) for answer in answers])

        body = decision_body(request)
        return await _ask(self._model, context, request.timeout, DECISIONS, body, parse) or (llm_pb2.DecisionResponse())


class LLMEmbeddings(llm_pb2_grpc.LLMEmbeddingsServicer):
    """The service LLMEmbeddings. Responds by the deadline, without numbers if the model gives none."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def Embed(self, request: llm_pb2.EmbedRequest, context: CallContext) -> llm_pb2.EmbedResponse:
        if not request.texts:
            return llm_pb2.EmbedResponse()
        _check_texts(request.texts)
        if request.dimensions < 0:
            raise InvalidArgument(f"`dimensions` is {request.dimensions}; it must be positive, or 0 for all")

        def ask(piece: int) -> Question[list[llm_pb2.Embedding]]:
            texts = request.texts[piece * PIECE_TEXTS : (piece + 1) * PIECE_TEXTS]

            def parse(response: dict[str, Any]) -> list[llm_pb2.Embedding] | None:
                rows = [llm_pb2.Embedding(values=_vector(each["embedding"])) for each in response["data"]]
                return rows if len(rows) == len(texts) else None

            body: dict[str, Any] = {"input": list(texts), "encoding_format": "base64"}
            body |= {"dimensions": request.dimensions} if request.dimensions else {}
            body |= {"prompt_name": request.prompt_name} if request.prompt_name else {}
            return json_question("/v1/embeddings", body, parse)

        deadline = self._model.deadline(context, request.timeout)
        pieces = -(-len(request.texts) // PIECE_TEXTS)
        answers = await self._model.answers(context, pieces, ask, self._model.generation(0), deadline)
        if any(answer.value is None for answer in answers):
            return llm_pb2.EmbedResponse()
        return llm_pb2.EmbedResponse(embeddings=[row for answer in answers for row in answer.value or []])

    async def Rerank(self, request: llm_pb2.RerankRequest, context: CallContext) -> llm_pb2.RerankResponse:
        if not request.texts:
            return llm_pb2.RerankResponse()
        if not request.query:
            raise InvalidArgument("`query` is empty; give the text to rank the others by")
        _check_texts(request.texts)

        def parse(response: dict[str, Any]) -> llm_pb2.RerankResponse | None:
            ranking = [
                llm_pb2.RankedText(index=each["index"], score=each["relevance_score"]) for each in response["results"]
            ]
            whole = sorted(each.index for each in ranking) == list(range(len(request.texts)))
            return llm_pb2.RerankResponse(ranking=ranking) if whole else None

        body = {"query": request.query, "documents": list(request.texts)}
        return await _ask(self._model, context, request.timeout, "/v2/rerank", body, parse) or (
            llm_pb2.RerankResponse()
        )


def decision_body(request: llm_pb2.DecisionRequest) -> dict[str, Any]:
    """Returns the body of a request to /v1/decisions."""
    body: dict[str, Any] = {"input": request.input, "questions": list(map(_question, request.questions))}
    if request.images:
        parts = [{"type": "input_image", "image_url": data_url(image)} for image in request.images]
        text = [{"type": "input_text", "text": request.input}]
        body["input"] = [{"type": "message", "role": "user", "content": parts + text}]
    return body | ({"model": request.adapter_id} if request.adapter_id else {})


def json_question(
    route: str, body: dict[str, Any], parse: Callable[[dict[str, Any]], T | None], endpoint: Endpoint | None = None
) -> Question[T]:
    """Returns a question that sends `body` to `route` and parses the JSON response.

    parse: takes the response's object. It may raise ValueError, TypeError, KeyError or IndexError if the response has
    another form; the question then has no value.
    """

    def parse_text(text: str) -> T | None:
        try:
            response = json.loads(text)
            return parse(response) if isinstance(response, dict) else None
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            return None

    return Question(json.dumps(body), parse_text, route, endpoint)


async def _ask(
    model: ModelClient,
    context: CallContext,
    timeout_ms: int,
    route: str,
    body: dict[str, Any],
    parse: Callable[[dict[str, Any]], T | None],
) -> T | None:
    deadline = model.deadline(context, timeout_ms)
    ask = json_question(route, body, parse)
    (answer,) = await model.answers(context, 1, lambda _: ask, model.generation(0), deadline)
    return answer.value


def _vector(values: str | list[float]) -> Sequence[float]:
    """Returns the numbers of an embedding: decodes float32 in base64; servers without base64 send a list."""
    if not isinstance(values, str):
        return values
    vector = array("f", b64decode(values, validate=True))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def _question(asked: llm_pb2.DecisionQuestion) -> dict[str, Any]:
    def option(name: str, each: llm_pb2.DecisionOption) -> dict[str, str]:
        return {name: each.label} | ({"description": each.description} if each.description else {})

    if asked.choices:
        kind: dict[str, Any] = {"type": "choice", "choices": [option("value", choice) for choice in asked.choices]}
    elif asked.levels:
        kind = {"type": "score", "levels": [option("label", level) for level in asked.levels]}
    else:
        kind = {"type": "predicate"}
    return {"instructions": asked.instructions, **kind}


def _answer(asked: llm_pb2.DecisionQuestion, answer: dict[str, Any]) -> llm_pb2.DecisionAnswer:
    mass = answer.get("label_mass", 0.0)
    if answer["type"] == "refusal":
        return llm_pb2.DecisionAnswer(label_mass=mass)
    if answer["type"] == "predicate":
        return llm_pb2.DecisionAnswer(probabilities=[answer["probability"]], label_mass=mass)
    options = asked.choices or asked.levels
    probabilities = [each["probability"] for each in answer["probabilities"]]
    best = max(range(len(options)), key=probabilities.__getitem__)
    return llm_pb2.DecisionAnswer(
        probabilities=probabilities,
        label=options[best].label,
        score=answer.get("score", 0.0),
        confidence=answer["confidence"],
        label_mass=mass,
    )


def _check_decision(request: llm_pb2.DecisionRequest) -> None:
    """Raises InvalidArgument, which names the field, if the request is invalid."""
    if not request.input:
        raise InvalidArgument("`input` is empty; give the text that the questions are about")
    if not request.questions:
        raise InvalidArgument("`questions` is empty; give at least one")
    for number, asked in enumerate(request.questions):
        place = f"questions[{number}]"
        if not asked.instructions:
            raise InvalidArgument(f"`{place}.instructions` is empty; give the question")
        if asked.choices and asked.levels:
            raise InvalidArgument(f"`{place}` has choices and levels; give one of them")
        for name, options in (("choices", asked.choices), ("levels", asked.levels)):
            if len(options) == 1:
                raise InvalidArgument(f"`{place}.{name}` has one entry; give at least two")
            labels = {each.label for each in options}
            if len(labels) < len(options) or "" in labels:
                raise InvalidArgument(f"`{place}.{name}` has two options with the same label, or an empty one")


def _check_texts(texts: Any) -> None:
    if len(texts) > MOST_TEXTS:
        raise InvalidArgument(f"`texts` has {len(texts)} entries; it must have at most {MOST_TEXTS}")
    if "" in texts:
        raise InvalidArgument("`texts` has an empty text; leave it out")
