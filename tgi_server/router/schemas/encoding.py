"""Bodies of the routes that embed, rank and classify texts: OpenAI's, TEI's, Jina's and Cohere's."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from pydantic import BeforeValidator, Field, RootModel, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from tgi_server.router.schemas.base import Name, RefusingModel, RequestModel, ResponseModel
from tgi_server.router.schemas.completions import Prompt
from tgi_server.router.schemas.validation import BY_TYPE

# Texts of one request, as OpenAI has it.
MOST_TEXTS = 2048
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
_PROMPT_NAME = Field(default=None, description="Name of the prompt of the model that is put before each text.")
_TOKENS = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _side(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Side = Annotated[Literal["left", "right"], BeforeValidator(_side)]


class EmbeddingsRequest(RefusingModel):
    """The body of /v1/embeddings."""

    harmless: ClassVar[frozenset[str]] = frozenset({"user", "request_id", "priority"})
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"messages": ([],), "mm_processor_kwargs": ({},)}

    input: Prompt
    model: Name | None = None
    dimensions: _TOKENS | None = Field(default=None, description="The first numbers of each embedding, normalized.")
    encoding_format: Literal["float", "base64"] | None = "float"
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        default=None,
        description="Maximum number of tokens of a text, which loses its end; -1: as many as the model reads.",
    )
    prompt_name: Name | None = _PROMPT_NAME


class Embedding(ResponseModel, kw_only=True):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Meta(description="numbers; or the base64 of little-endian float32")]


class EmbeddingUsage(ResponseModel, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(ResponseModel, kw_only=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class _Fitted(RequestModel):
    truncate: bool = Field(default=False, description="Cut texts that are too long.")
    truncation_direction: Side = Field(default="right", description="The end that is cut.")


class EmbedRequest(_Fitted):
    """The body of TEI's /embed."""

    inputs: Prompt
    normalize: bool = Field(default=True, description="Embeddings of length 1.")
    prompt_name: Name | None = _PROMPT_NAME
    dimensions: _TOKENS | None = None


class RankRequest(_Fitted):
    """The body of TEI's /rerank."""

    query: Annotated[str, Field(min_length=1)]
    texts: Texts
    raw_scores: bool = Field(default=False, description="Logits instead of probabilities.")
    return_text: bool = False
    instruction: str | None = Field(default=None, description="For models that answer yes or no.")


class Rank(ResponseModel, kw_only=True, omit_defaults=True):
    index: int
    score: float
    text: str | None = None


_Pair = Annotated[list[str], Field(min_length=1, max_length=2)]
_Pairs = Annotated[list[_Pair], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]


def _classified(inputs: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(inputs)
    except ValidationError:
        raise PydanticCustomError(
            "inputs", f"must be a text, a pair of texts, or a list of 1 to {MOST_TEXTS} lists of one or two texts"
        ) from None


class PredictRequest(_Fitted):
    """The body of TEI's /predict."""

    inputs: Annotated[str | _Pair | _Pairs, WrapValidator(_classified)] = Field(
        description="A text or a pair of texts, or a list of them, each in a list of its own."
    )
    raw_scores: bool = Field(default=False, description="Logits instead of probabilities.")

    @property
    def single(self) -> bool:
        """Returns True for one text or pair, whose answer is in no list."""
        return isinstance(self.inputs, str) or isinstance(self.inputs[0], str)

    @property
    def pairs(self) -> list[list[str]]:
        """Returns the texts and pairs."""
        if isinstance(self.inputs, str):
            return [[self.inputs]]
        return [list(map(str, self.inputs))] if self.single else [list(each) for each in self.inputs]


class Prediction(ResponseModel, kw_only=True):
    label: str
    score: float


def _text_of(document: Any) -> Any:
    return document["text"] if isinstance(document, dict) and isinstance(document.get("text"), str) else document


def _in_list(documents: Any) -> Any:
    return [documents] if isinstance(documents, str | dict) else documents


_Document = Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | dict[str, Any])]
_Documents = Annotated[list[_Document], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]


class RerankRequest(RefusingModel):
    """The body of /v1/rerank, /v2/rerank and /rerank, as Jina and Cohere have it."""

    harmless: ClassVar[frozenset[str]] = frozenset({"priority", "user", "request_id"})
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rank_fields": (["text"],), "max_chunks_per_doc": (1,)}

    model: Name | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[_Documents, BeforeValidator(_in_list, json_schema_input_type=_Document | _Documents)] = Field(
        description="Texts, or objects with a `text`; or one of them alone."
    )
    top_n: _TOKENS | None = Field(default=None, description="Number of results. Default: all.")
    return_documents: bool | None = Field(default=None, description="Default: false for /v2/rerank, otherwise true.")
    max_tokens_per_doc: _TOKENS | None = Field(default=None, description="Longer documents are cut.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    instruction: str | None = Field(default=None, description="For models that answer yes or no.")


class AnyRankRequest(RootModel[Annotated[RankRequest | RerankRequest, BY_TYPE]]):
    """The body of /rerank: TEI's with `texts`, Jina's with `documents`."""


class RankedDocument(ResponseModel, kw_only=True):
    text: str


class RankedResult(ResponseModel, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankUsage(ResponseModel, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(ResponseModel, kw_only=True):
    """`usage` is Jina's, `meta` Cohere's."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedResult]
    usage: RerankUsage
    meta: dict[str, Any]
