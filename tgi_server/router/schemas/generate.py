"""Bodies of /generate, /generate_stream and /, as TGI has them."""

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType
from pydantic import Field

from tgi_server.contract import FinishReason
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import (
    NOT_EMPTY,
    RefusingModel,
    ResponseModel,
    takes_options,
)
from tgi_server.router.schemas.grammar import GrammarType

# The form of an answer, as other interfaces ask for it: a client that gets another form would not notice.
_OTHER_FORMS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema"), ()),
    **dict.fromkeys(("response_format", "structured_outputs"), ()),
    "tools": ([],),
}


@takes_options(Dialect.TGI)
class GenerateParameters(RefusingModel):
    """TGI's parameters, and further options that this server has in all of its interfaces, such as `min_p`,
    `logit_bias`, `min_tokens` and `timeout_ms`.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = _OTHER_FORMS

    details: bool = Field(default=False, description="Report tokens, logprobs, finish reason and seed.")
    grammar: GrammarType | None = Field(default=None, description="Form that the text must have.")
    return_full_text: bool | None = Field(default=None, description="Put the prompt in front of the text.")


# TGI samples when a request has no `parameters` at all.
_NO_PARAMETERS = GenerateParameters.model_validate({"do_sample": True})


class GenerateRequest(RefusingModel):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_OTHER_FORMS, "grammar": ()}

    inputs: str = Field(json_schema_extra=NOT_EMPTY)
    parameters: GenerateParameters = _NO_PARAMETERS
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=1024, description="Wins over the one in `parameters`."
    )


class CompatGenerateRequest(GenerateRequest):
    stream: bool = False


class PrefillToken(ResponseModel, kw_only=True):
    id: int
    text: str
    logprob: float | None


class Token(ResponseModel, kw_only=True):
    """`drafted`: the token had been drafted; in streams only."""

    id: int
    text: str
    logprob: float | None
    special: bool
    drafted: bool | UnsetType = UNSET


class BestOfSequence(ResponseModel, kw_only=True):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(ResponseModel, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET


class GenerateResponse(ResponseModel, kw_only=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(ResponseModel, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(ResponseModel, kw_only=True):
    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None
    details: StreamDetails | None


class SimpleToken(ResponseModel, kw_only=True):
    """`start` and `stop` count characters of the input."""

    id: int
    text: str
    start: int
    stop: int
