"""The members that bodies of /v1/completions and /v1/chat/completions share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from tgi_server.router.schemas.base import (
    PENALTY,
    POSITIVE,
    CacheSalt,
    Int32,
    Items,
    Off,
    On,
    RefusingModel,
    RequestModel,
    ResponseModel,
    TokenBiases,
    TokenIds,
    UnsignedInt,
)
from tgi_server.router.schemas.grammar import GrammarType


class StreamOptions(RequestModel):
    include_usage: Off = Field(default=False, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: Off = Field(
        default=False, description="With `include_usage`: send the usage so far in every chunk."
    )


class PromptTokensDetails(ResponseModel):
    """`cached_tokens` had been computed for another prompt; in steps of 128 where everybody shares the cache."""

    cached_tokens: UnsignedInt


class Usage(ResponseModel):
    prompt_tokens: UnsignedInt
    completion_tokens: UnsignedInt
    total_tokens: UnsignedInt
    prompt_tokens_details: PromptTokensDetails


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


# OpenAI's may be negative; -1 is vLLM's way of asking for none.
AnySeed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]


class StructuredOutputs(RefusingModel):
    """The form of the answer, as vLLM's clients ask for it: one of these members."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"disable_additional_properties": (False,)}

    json_schema: Any = Field(default=None, alias="json", description="JSON schema, as an object or as a string.")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(default=None, description="A context-free grammar in llguidance's dialect of Lark.")
    json_object: Off = False
    structural_tag: None = Field(default=None, description="Not supported.")
    whitespace_pattern: None = Field(default=None, description="Not supported: the layout of JSON is fixed.")


class TextParameters(RefusingModel):
    """Parameters of sampling and of the end of a text, on all routes of OpenAI; vLLM's are included."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "client_metadata"),
            *("request_id", "guided_decoding_backend", "kv_transfer_params"),
        }
    )

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "early_stopping": (False,),
        "ebnf": (),
        "grammar": (),
        "guided_whitespace_pattern": (),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "structural_tag": (),
        "thinking_token_budget": (),
        "typical_p": (1, 1.0),
        "use_beam_search": (False,),
        "whitespace_pattern": (),
    }

    cache_salt: CacheSalt = None
    frequency_penalty: float | None = Field(
        json_schema_extra=PENALTY,
        default=None,
        description="-2 to 2: penalty of a token for each time that it was generated.",
    )
    presence_penalty: float | None = Field(
        json_schema_extra=PENALTY, default=None, description="-2 to 2: penalty of a token once it was generated."
    )
    repetition_penalty: float | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Divides the logits of tokens seen before."
    )
    logit_bias: LogitBias = Field(
        default=None, description="Added to the logits, by token id; as a list (TGI's form) one for each token."
    )
    seed: AnySeed | None = Field(default=None, description="Seed of sampling; unset or -1: random.")
    stop: Stop = Field(default=None, description="Texts that end the generation; they are not shown.")
    stop_token_ids: TokenIds | None = Field(default=None, description="Tokens that end the text.")
    include_stop_str_in_output: Off = Field(default=False, description="Show the stop sequence.")
    skip_special_tokens: On = Field(default=True, description="Leave special tokens out of the text.")
    min_tokens: UnsignedInt | None = Field(default=None, description="The text has at least so many tokens.")
    truncate_prompt_tokens: Int32 | None = Field(
        default=None, description="Use only so many last tokens of the prompt; -1: as many as it may have."
    )
    temperature: float | None = Field(default=None, description="Divides the logits; 0: always the likeliest token.")
    top_k: Int32 | None = Field(default=None, description="Sample from so many most likely tokens.")
    top_p: float | None = Field(default=None, description="Sample from the likeliest tokens of this total probability.")
    min_p: float | None = Field(default=None, description="Drop tokens less likely than this share of the likeliest.")
    ignore_eos: Off = Field(default=False, description="Go on to `max_tokens` whatever the model says.")


class SharedParameters(TextParameters):
    """Parameters of chats and completions."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TextParameters.refused,
        "audio": (),
        "chat_template": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    model: str | None = Field(default=None, description="The name of an adapter, or of the model.")
    max_tokens: UnsignedInt | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Tokens to generate; unset: as many as fit."
    )
    max_completion_tokens: UnsignedInt | None = Field(default=None, description="OpenAI's newer name of `max_tokens`.")
    n: UnsignedInt | None = Field(
        json_schema_extra=POSITIVE, default=None, description="Answers to generate for each prompt."
    )
    stream: Off = False
    stream_options: StreamOptions | None = None
    response_format: GrammarType | None = Field(default=None, description="Form that the answer must have.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="vLLM's way to ask for a form.")
    guided_json: Any = Field(default=None, description="JSON schema of the answer: vLLM's older name.")
    guided_regex: str | None = Field(default=None, description="Regular expression of the answer: as above.")
    guided_choice: Items[str] | None = Field(default=None, description="Answers to choose from: as above.")
    guided_grammar: str | None = Field(default=None, description="Lark grammar of the answer: as above.")
    json_schema: Any = Field(default=None, description="JSON schema of the answer: SGLang's and llama.cpp's name.")
    regex: str | None = Field(default=None, description="Regular expression of the answer: SGLang's name.")

    @property
    def token_limit(self) -> int | None:
        """The number of tokens to generate at most, by whichever of its names it is given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
