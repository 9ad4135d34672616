"""/v1/embeddings, OpenAI's, and /embed, that of Text Embeddings Inference (TEI)."""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Raw
from starlette.responses import Response
from starlette.routing import Route

from shared.stubs import generate_pb2 as pb
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS, REQUEST_ERRORS
from tgi_server.router.api.encoding import to_json
from tgi_server.router.api.values import encode, respond_with_values, served_encoder
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.encoding import (
    MOST_TEXTS,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
)
from tgi_server.router.schemas.encoding import Embedding as EmbeddingObject
from tgi_server.router.schemas.encoding import EmbeddingUsage as Usage
from tgi_server.router.service import Service
from tgi_server.router.text.encoder import Fitting, ServedEncoder, Values


def embedding_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    summary = "Embeddings of texts, as OpenAI has them"
    routes.receive("/v1/embeddings", summary, EmbeddingsRequest, embed_texts, EmbeddingsResponse)
    tei = (EmbedRequest, _embed, "Embeddings", None, REQUEST_ERRORS)
    routes.receive("/embed", "Embeddings of texts, as TEI has them", *tei)
    if not service.generates:  # or it generates
        routes.receive("/", "Embeddings of texts, as Hugging Face's endpoints have them", *tei)
    return routes


async def embed_texts(admission: Admission, request: EmbeddingsRequest) -> Response:
    """Responds with the embeddings of texts."""
    encoder = served_encoder(admission, "embed", request.model)
    most = request.truncate_prompt_tokens
    fitting = Fitting("input", cut=most is not None, most=most if most and most > 0 else None)
    prompt = encoder.prompt(request.prompt_name)
    dimensions = dimensions_of(encoder, request.dimensions)
    inputs = await tokens_of(encoder, request.input.root, fitting, prompt)
    values = await encode(admission, encoder, inputs, dimensions=dimensions, normalize=True)
    tokens = admission.record.read_tokens

    def response() -> EmbeddingsResponse:
        rows: Iterable[Any] = (
            (b64encode(row).decode() for row in values) if request.encoding_format == "base64" else rows_of(values)
        )
        return EmbeddingsResponse(
            object="list",
            data=[EmbeddingObject(object="embedding", index=index, embedding=row) for index, row in enumerate(rows)],
            model=encoder.name,
            usage=Usage(prompt_tokens=tokens, total_tokens=tokens),
        )

    return await respond_with_values(admission, response, size=values.size)


async def _embed(admission: Admission, request: EmbedRequest) -> Response:
    encoder = served_encoder(admission, "embed", None)
    fitting = Fitting("inputs", cut=request.truncate, left=request.truncation_direction == "left")
    prompt = encoder.prompt(request.prompt_name)
    dimensions = dimensions_of(encoder, request.dimensions)
    inputs = await tokens_of(encoder, request.inputs.root, fitting, prompt)
    values = await encode(admission, encoder, inputs, dimensions=dimensions, normalize=request.normalize)
    return await respond_with_values(admission, lambda: list(rows_of(values)), size=values.size)


def rows_of(values: Values) -> Iterator[Raw]:
    """Yields each row as JSON, encoded separately, since encoding keeps the GIL."""
    return (Raw(to_json(row)) for row in values.numbers())


async def tokens_of(
    encoder: ServedEncoder, texts: Sequence[str | list[int]], fitting: Fitting, prompt: str
) -> list[pb.EncodeInput]:
    """Tokenizes texts, or checks texts that came as tokens. Raises InvalidRequest."""
    name = fitting.name
    if not 0 < len(texts) <= MOST_TEXTS:
        raise InvalidRequest.at(name, f"has {len(texts)} texts; it may have 1 to {MOST_TEXTS}")
    if isinstance(texts[0], str):
        if "" in texts:
            raise InvalidRequest.at(name, "has an empty text; leave it out")
        return await encoder.of_texts([str(text) for text in texts], fitting, prompt=prompt)
    return await encoder.of_tokens([ids for ids in texts if not isinstance(ids, str)], fitting)


def dimensions_of(encoder: ServedEncoder, requested: int | None) -> int:
    """Returns the requested number of dimensions; 0: all of the model's. Raises InvalidRequest."""
    if requested is not None and requested > encoder.info.columns:
        raise InvalidRequest.at("dimensions", f"is {requested}; it must be at most {encoder.info.columns}")
    return requested or 0
