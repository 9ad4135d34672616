"""/rerank and /predict of Text Embeddings Inference (TEI); /v1/rerank of Jina's API, and /v2/rerank of Cohere's.

/rerank also accepts Jina's requests, as vLLM does.
"""

from collections.abc import Sequence
from functools import partial
from math import exp
from typing import Any
from uuid import uuid4

from msgspec import Raw
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS, REQUEST_ERRORS
from tgi_server.router.api.encoding import to_json
from tgi_server.router.api.values import encode, respond_with_values, served_encoder
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.encoding import (
    AnyRankRequest,
    Prediction,
    PredictRequest,
    Rank,
    RankedDocument,
    RankedResult,
    RankRequest,
    RerankRequest,
    RerankResponse,
    RerankUsage,
)
from tgi_server.router.service import Service
from tgi_server.router.text.decisions import softmax
from tgi_server.router.text.encoder import Fitting, ServedEncoder, Values

# Bytes of a label and its score in a response, without its name.
_LABEL_BYTES = 40
# Pairs that Cohere counts as one search.
_PAIRS_OF_A_SEARCH = 100


def ranking_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, REQUEST_ERRORS)
    summary = "Scores of `texts` for a query, as TEI has them; of `documents`, as Jina has them"
    routes.receive("/rerank", summary, AnyRankRequest, _in_either_form, "AnyRanks")
    routes.receive("/predict", "Labels of texts or pairs, as TEI has them", PredictRequest, _predict, "Predictions")
    summary = "Scores of documents for a query, as Jina and Cohere have them"
    for version in "12":
        handle = partial(_rerank, version=version)
        routes.receive(f"/v{version}/rerank", summary, RerankRequest, handle, RerankResponse, errors=OPENAI_ERRORS)
    return routes


async def _in_either_form(admission: Admission, body: AnyRankRequest) -> Response:
    match body.root:
        case RankRequest() as request:
            return await _rank(admission, request)
        case RerankRequest() as request:
            return await _rerank(admission, request, version="1")


async def _rank(admission: Admission, request: RankRequest) -> Response:
    encoder = _scorer(admission, None)
    fitting = Fitting("texts", cut=request.truncate, left=request.truncation_direction == "left")
    pairs = [(request.query, text) for text in request.texts]
    inputs = await encoder.of_pairs(pairs, fitting, instruction=request.instruction)
    values = await encode(admission, encoder, inputs)

    def ranks() -> list[Rank]:
        return [
            Rank(index=index, score=score, text=request.texts[index] if request.return_text else None)
            for index, score in _sorted(_scores(values, raw=request.raw_scores))
        ]

    return await respond_with_values(admission, ranks, size=len(inputs))


async def _rerank(admission: Admission, request: RerankRequest, *, version: str) -> Response:
    """Responds with scores. Truncates documents that are too long, as Jina and Cohere do.

    version: 1 for Jina's API, 2 for Cohere's.
    """
    encoder = _scorer(admission, request.model)
    most = request.max_tokens_per_doc or request.truncate_prompt_tokens
    fitting = Fitting("documents", cut=True, most=most if most and most > 0 else None)
    pairs = [(request.query, text) for text in request.documents]
    inputs = await encoder.of_pairs(pairs, fitting, instruction=request.instruction)
    values = await encode(admission, encoder, inputs)
    shows = version == "1" if request.return_documents is None else request.return_documents
    tokens = admission.record.read_tokens

    def response() -> RerankResponse:
        return RerankResponse(
            id=f"rerank-{uuid4().hex}",
            object="list",
            model=encoder.name,
            results=[
                RankedResult(
                    index=index,
                    relevance_score=score,
                    document=RankedDocument(text=request.documents[index]) if shows else None,
                )
                for index, score in _sorted(_scores(values))[: request.top_n]
            ],
            usage=RerankUsage(prompt_tokens=tokens, total_tokens=tokens),
            meta={
                "api_version": {"version": version},
                "billed_units": {"search_units": -(-len(pairs) // _PAIRS_OF_A_SEARCH)},
                "tokens": {"input_tokens": tokens},
            },
        )

    return await respond_with_values(admission, response, size=len(inputs))


async def _predict(admission: Admission, request: PredictRequest) -> Response:
    encoder = served_encoder(admission, "rank", None)
    if encoder.info.answers:
        raise InvalidRequest("the rerank model answers yes or no and has no labels; send its texts to /rerank")
    fitting = Fitting("inputs", cut=request.truncate, left=request.truncation_direction == "left")
    given = request.pairs
    pairs = [(each[0], each[1]) for each in given if len(each) == 2]
    texts = [each[0] for each in given if len(each) == 1]
    of_pairs = iter(await encoder.of_pairs(pairs, fitting))
    of_texts = iter(await encoder.of_texts(texts, fitting))
    inputs = [next(of_pairs if len(each) == 2 else of_texts) for each in given]
    values = await encode(admission, encoder, inputs)
    labels = list(encoder.info.labels)
    admission.lease.hold(_LABEL_BYTES * values.size + values.size * max(map(len, labels)))

    def predictions(row: list[float]) -> Raw:
        scores = _sorted(row if request.raw_scores else _probabilities(row))
        return Raw(to_json([Prediction(label=labels[index], score=score) for index, score in scores]))

    def answers() -> Any:
        rows = list(map(predictions, values.numbers()))
        return rows[0] if request.single else rows

    return await respond_with_values(admission, answers, size=len(inputs) * len(labels))


def _scorer(admission: Admission, model: str | None) -> ServedEncoder:
    """Returns the rerank model. Raises InvalidRequest if it has several labels, so that no single score exists."""
    encoder = served_encoder(admission, "rank", model)
    if encoder.info.columns > 1:
        raise InvalidRequest(
            f"{encoder.name} classifies into {encoder.info.columns} labels and ranks nothing; use /predict"
        )
    return encoder


def _scores(values: Values, *, raw: bool = False) -> list[float]:
    return [row[0] if raw else _sigmoid(row[0]) for row in values.numbers()]


def _probabilities(logits: Sequence[float]) -> list[float]:
    """Returns the softmax of the labels' logits, or the sigmoid of a single logit."""
    return softmax(logits) if len(logits) > 1 else [_sigmoid(logits[0])]


def _sigmoid(logit: float) -> float:
    return 1 / (1 + exp(-logit)) if logit >= 0 else exp(logit) / (1 + exp(logit))


def _sorted(scores: Sequence[float]) -> list[tuple[int, float]]:
    """Returns (index, score), the highest score first."""
    return sorted(enumerate(scores), key=lambda each: -each[1])
