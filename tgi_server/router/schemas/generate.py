"""Bodies of /generate, /generate_stream, / and /tokenize, as TGI has them; and of /detokenize."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, RootModel

from tgi_server.contract import FinishReason
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import (
    NOT_EMPTY,
    RefusingModel,
    RequestModel,
    ResponseModel,
    Seed,
    UnsignedInt,
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
    """TGI's parameters.

    Not TGI's are `min_p`, `presence_penalty`, `logit_bias`, `ignore_eos`, `cache_salt`, `min_tokens`, `stop_token_ids`
    and `skip_special_tokens`.
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


class PrefillToken(ResponseModel):
    id: UnsignedInt
    text: str
    logprob: float | None


class Token(ResponseModel):
    id: UnsignedInt
    text: str
    logprob: float | None
    special: bool
    drafted: bool = Field(default=False, description="The token had been drafted; told in streams only.")


class BestOfSequence(ResponseModel):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: UnsignedInt
    seed: Seed | None = None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] = Field(default=[])


class Details(ResponseModel):
    finish_reason: FinishReason
    generated_tokens: UnsignedInt
    seed: Seed | None = None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] = Field(default=[])
    best_of_sequences: list[BestOfSequence] | None = None


class GenerateResponse(ResponseModel):
    generated_text: str
    details: Details | None = None


class StreamDetails(ResponseModel):
    finish_reason: FinishReason
    generated_tokens: UnsignedInt
    seed: Seed | None = None
    input_length: UnsignedInt


class StreamResponse(ResponseModel):
    index: UnsignedInt
    token: Token
    top_tokens: list[Token] = Field(default=[])
    generated_text: str | None = None
    details: StreamDetails | None = None


class SimpleToken(ResponseModel):
    id: UnsignedInt
    text: str
    start: UnsignedInt
    stop: UnsignedInt


class TokenizeRequest(RequestModel):
    """Parameters of a generation are ignored."""

    inputs: str = Field(json_schema_extra=NOT_EMPTY)


class DetokenizeRequest(RequestModel):
    tokens: Annotated[list[UnsignedInt], Field(max_length=1_000_000, fail_fast=True)]


class DetokenizeResponse(ResponseModel):
    """`prompt` is the text, special tokens included; the name is vLLM's."""

    prompt: str


class TokenizeResponse(RootModel[list[SimpleToken]]):
    """`start` and `stop` count characters of the input."""
