"""Bodies of /generate, /generate_stream, / and /tokenize, as TGI has them; and of /detokenize."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, RootModel

from tgi_server.contract import FinishReason
from tgi_server.router.schemas.base import (
    NOT_EMPTY,
    PENALTY,
    POSITIVE,
    PROBABILITY,
    CacheSalt,
    Int32,
    Items,
    RefusingModel,
    RequestModel,
    ResponseModel,
    Seed,
    TokenBiases,
    TokenIds,
    UnsignedInt,
)
from tgi_server.router.schemas.grammar import GrammarType

# The form of an answer, as other interfaces ask for it: a client that gets another form would not notice.
_OTHER_FORMS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema"), ()),
    **dict.fromkeys(("response_format", "structured_outputs"), ()),
    "tools": ([],),
}


class GenerateParameters(RefusingModel):
    """TGI's parameters.

    Not TGI's are `min_p`, `presence_penalty`, `logit_bias`, `ignore_eos`, `cache_salt`, `min_tokens`, `stop_token_ids`
    and `skip_special_tokens`.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = _OTHER_FORMS
    # OpenAI's `frequency_penalty` has another rule than TGI's.
    counts_tokens: ClassVar[bool] = False

    adapter_id: str | None = Field(default=None, description="Adapter to use.")
    best_of: UnsignedInt | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Generate so many sequences, answer with the most likely."
    )
    cache_salt: CacheSalt = None
    decoder_input_details: bool = Field(default=False, description="Report the prompt's tokens and logprobs.")
    details: bool = Field(default=False, description="Report tokens, logprobs, finish reason and seed.")
    do_sample: bool = Field(default=False, description="Sample, rather than take the most likely token.")
    frequency_penalty: float | None = Field(
        json_schema_extra=PENALTY,
        default=None,
        description="-2 to 2: penalty of a token, times its share of prompt and generated text.",
    )
    grammar: GrammarType | None = Field(default=None, description="Form that the text must have.")
    ignore_eos: bool = Field(default=False, description="Go on to `max_new_tokens` whatever the model says.")
    logit_bias: TokenBiases | None = Field(default=None, description="Added to the logits, by token id.")
    max_new_tokens: Int32 | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Tokens to generate; unset: as many as fit."
    )
    min_tokens: UnsignedInt | None = Field(default=None, description="The text has at least so many tokens.")
    min_p: float | None = Field(
        default=None, description="Drop tokens less likely than this share of the most likely one's probability."
    )
    presence_penalty: float | None = Field(
        json_schema_extra=PENALTY, default=None, description="-2 to 2: penalty of a token once it was generated."
    )
    repetition_penalty: float | None = Field(
        json_schema_extra=POSITIVE,
        default=None,
        description="Divides the logits of tokens seen before; 1 switches it off.",
    )
    return_full_text: bool | None = Field(default=None, description="Put the prompt in front of the text.")
    seed: Seed | None = Field(default=None, description="Seed of sampling; unset: random.")
    skip_special_tokens: bool = Field(default=True, description="Leave special tokens out of the text.")
    stop: Items[str] = Field(default=[], description="Texts that end the generation.")
    stop_token_ids: TokenIds | None = Field(default=None, description="Tokens that end the text.")
    temperature: float | None = Field(json_schema_extra=POSITIVE, default=None, description="Divides the logits.")
    top_k: Int32 | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Sample from so many most likely tokens."
    )
    top_n_tokens: UnsignedInt | None = Field(
        default=None, description="Report so many most likely tokens at each position."
    )
    top_p: float | None = Field(
        json_schema_extra=PROBABILITY,
        default=None,
        description="Sample from the likeliest tokens of this total probability.",
    )
    truncate: UnsignedInt | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Use only so many last tokens of the prompt."
    )
    typical_p: float | None = Field(
        json_schema_extra=PROBABILITY, default=None, description="Typical decoding mass (arXiv:2202.00666)."
    )
    watermark: bool = Field(default=False, description="Watermark the text (arXiv:2301.10226).")


class CountingParameters(GenerateParameters):
    """The parameters of OpenAI's routes, whose `frequency_penalty` counts generated tokens."""

    counts_tokens: ClassVar[bool] = True


# TGI samples when a request has no `parameters` at all.
_NO_PARAMETERS = GenerateParameters(do_sample=True)


class GenerateRequest(RefusingModel):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_OTHER_FORMS, "grammar": ()}

    inputs: str = Field(json_schema_extra=NOT_EMPTY)
    parameters: GenerateParameters = _NO_PARAMETERS
    cache_salt: CacheSalt = Field(default=None, description="Wins over the one in `parameters`.")

    @property
    def chosen_parameters(self) -> GenerateParameters:
        """The parameters, with the salt of the request itself."""
        if self.cache_salt is None:
            return self.parameters
        return self.parameters.model_copy(update={"cache_salt": self.cache_salt})


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
