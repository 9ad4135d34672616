"""The members that bodies of /v1/completions and /v1/chat/completions share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, Raw, UnsetType
from pydantic import Field

from shared.partial_json import Member
from tgi_server.router.schemas.base import Items, RefusingModel, RequestModel, ResponseModel
from tgi_server.router.schemas.grammar import GrammarType


class StreamOptions(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = Field(default=False, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(
        default=False, description="With `include_usage`: send the usage so far in every chunk."
    )
    include_members: bool = Field(
        default=False, description="Send each member of an answer in JSON in a chunk of its own, once it is complete."
    )


class PrefixDifference(ResponseModel, kw_only=True):
    """The first difference of a prompt to the nearest earlier one: the `place` in the request, the `offset` in the text
    there, in characters, and some characters `before` it, from `here` on, and in the `earlier` prompt in place of them.
    """

    place: str
    offset: int | None
    before: str
    here: str
    earlier: str


class PrefixExplanation(ResponseModel, kw_only=True):
    """The cause of tokens that were missing in the prefix cache; null if only the last token was computed.

    `known_tokens` at the beginning of the prompt have been cached before; `movable_tokens` after the difference would
    have been found if the different text came after them.
    """

    cause: str | None
    missing_tokens: int
    known_tokens: int
    movable_tokens: int
    difference: PrefixDifference | None


class PromptTokensDetails(ResponseModel, kw_only=True):
    """`cached_tokens`: tokens found in the prefix cache, in multiples of 128 if all users share the cache.

    `prefix` is set if the request sets `explain_prefix`.
    """

    cached_tokens: int
    prefix: PrefixExplanation | UnsetType = UNSET


class CompletedMember(ResponseModel, kw_only=True):
    """A member of an answer that is a JSON object."""

    name: Annotated[Any, Meta(extra_json_schema={"type": "string"})]
    value: Any

    @classmethod
    def of(cls, member: Member) -> "CompletedMember":
        """Returns the member as it was written."""
        return cls(name=Raw(member.name.encode()), value=Raw(member.value.encode()))


class Usage(ResponseModel, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class OpenAIError(ResponseModel, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(ResponseModel, kw_only=True):
    """OpenAI's error object; `error_type` is TGI's name of it."""

    error: OpenAIError
    error_type: str


class StructuredOutputs(RefusingModel):
    """The form of the answer, as vLLM's clients ask for it: one of these members."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"disable_additional_properties": (False,)}

    json_schema: Any = Field(default=None, alias="json", description="JSON schema, as an object or as a string.")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(default=None, description="A context-free grammar in llguidance's dialect of Lark.")
    json_object: bool = False
    structural_tag: None = Field(default=None, description="Not supported.")
    whitespace_pattern: None = Field(default=None, description="Not supported: the layout of JSON is fixed.")


class TextParameters(RefusingModel):
    """The fields that all routes of OpenAI have in common, with vLLM's."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
            *("prompt_cache_options", "prompt_cache_retention", "client_metadata"),
            *("request_id", "guided_decoding_backend", "kv_transfer_params"),
        }
    )

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "bad_words": ([],),
        "conversation": (),
        "early_stopping": (False,),
        "ebnf": (),
        "grammar": (),
        "guided_whitespace_pattern": (),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "moderation": (),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "structural_tag": (),
        "typical_p": (1, 1.0),
        "use_beam_search": (False,),
        "whitespace_pattern": (),
    }


class SharedParameters(TextParameters):
    """Parameters of chats and completions."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: values for name, values in TextParameters.refused.items() if name != "return_token_ids"},
        "audio": (),
        "chat_template": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    reported: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    model: str | None = Field(default=None, description="The name of an adapter, or of the model.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(
        default=False, description="Send the token ids of the prompt and of the answer: vLLM's name."
    )
    explain_prefix: bool = Field(
        default=False, description="Explain in the usage why the prefix cache did not have the whole prompt."
    )
    response_format: GrammarType | None = Field(default=None, description="Form that the answer must have.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="vLLM's way to ask for a form.")
    guided_json: Any = Field(default=None, description="JSON schema of the answer: vLLM's older name.")
    guided_regex: str | None = Field(default=None, description="Regular expression of the answer: as above.")
    guided_choice: Items[str] | None = Field(default=None, description="Answers to choose from: as above.")
    guided_grammar: str | None = Field(default=None, description="Lark grammar of the answer: as above.")
    json_schema: Any = Field(default=None, description="JSON schema of the answer: SGLang's and llama.cpp's name.")
    regex: str | None = Field(default=None, description="Regular expression of the answer: SGLang's name.")
