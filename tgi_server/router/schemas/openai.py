"""The members that bodies of /v1/completions and /v1/chat/completions share."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tgi_server.router.schemas.base import (
    PENALTY,
    POSITIVE,
    CacheSalt,
    Int32,
    Items,
    RequestModel,
    ResponseModel,
    Seed,
    TokenBiases,
    UnsignedInt,
)


class StreamOptions(RequestModel):
    include_usage: bool = Field(default=False, description="Send a last chunk with the usage of the whole request.")


class Usage(ResponseModel):
    prompt_tokens: UnsignedInt
    completion_tokens: UnsignedInt
    total_tokens: UnsignedInt


class OpenAIError(ResponseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIErrorResponse(ResponseModel):
    """OpenAI's error object; `error_type` is TGI's name of it."""

    error: OpenAIError
    error_type: str


Stop = Annotated[
    Items[str] | None,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | Items[str] | None
    ),
]


def _by_token_id(biases: Any) -> Any:
    return {str(token): bias for token, bias in enumerate(biases) if bias != 0} if isinstance(biases, list) else biases


LogitBias = Annotated[
    TokenBiases | None,
    BeforeValidator(_by_token_id, json_schema_input_type=dict[str, float] | list[float] | None),
]


class SharedParameters(RequestModel):
    """`repetition_penalty`, `top_k`, `min_p` and `ignore_eos` go beyond OpenAI's parameters."""

    model: str | None = Field(default=None, description="Not used: the server has one model.")
    cache_salt: CacheSalt = None
    frequency_penalty: float | None = Field(
        json_schema_extra=PENALTY, default=None, description="-2 to 2: penalty of a token for each time."
    )
    presence_penalty: float | None = Field(
        json_schema_extra=PENALTY, default=None, description="-2 to 2: penalty of a token that was there."
    )
    repetition_penalty: float | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Divides the logits of tokens seen before."
    )
    logit_bias: LogitBias = Field(
        default=None, description="Added to the logits, by token id; as a list (TGI's form) one for each token."
    )
    max_tokens: UnsignedInt | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Tokens to generate; unset: as many as fit."
    )
    n: UnsignedInt | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Answers to generate for each prompt."
    )
    seed: Seed | None = Field(default=None, description="Seed of sampling; unset: random.")
    stop: Stop = Field(default=None, description="Texts that end the generation; they are not shown.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, description="Divides the logits; 0: always the likeliest token.")
    top_k: Int32 | None = Field(default=None, description="Sample from so many most likely tokens.")
    top_p: float | None = Field(default=None, description="Sample from the likeliest tokens of this total probability.")
    min_p: float | None = Field(default=None, description="Drop tokens less likely than this share of the likeliest.")
    ignore_eos: bool = Field(default=False, description="Go on to `max_tokens` whatever the model says.")
