"""/v1/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Field, RootModel, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import Items, ResponseModel, UnsignedInt, takes_options
from tgi_server.router.schemas.openai import CompletedMember, SharedParameters, Usage

# A prompt as tokens, which may be as long as a body can be.
PromptIds = Annotated[list[UnsignedInt], Field(min_length=1, max_length=10_000_000, fail_fast=True)]


def _several(prompt: Any) -> Any:
    """Returns a list of prompts, for one of them as well."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        return [prompt]
    return prompt


def _shaped(prompt: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Returns the prompts, or refuses them with a message of its own, since that of a union tells a client nothing."""
    several = _several(prompt)
    if isinstance(several, list) and [] in several:
        raise PydanticCustomError("prompt", "must have at least one token in each list")
    try:
        return read(several)
    except ValidationError:
        raise PydanticCustomError(
            "prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists"
        ) from None


class Prompt(
    RootModel[
        Annotated[
            Items[str] | Items[PromptIds],
            WrapValidator(_shaped, json_schema_input_type=str | Items[str] | PromptIds | Items[PromptIds]),
        ]
    ]
):
    """One prompt, or several, as text or as tokens."""

    model_config = ConfigDict(strict=True)


@takes_options(Dialect.COMPLETIONS)
class CompletionRequest(SharedParameters):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SharedParameters.refused,
        # Of chats, which have a template, thoughts and tools.
        "chat_template_kwargs": ({},),
        "documents": ([],),
        "include_reasoning": (True,),
        "messages": ([],),
        "reasoning_effort": ("none",),
        "suffix": ("",),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
    }

    prompt: Prompt
    suffix: str | None = Field(default=None, description="Not supported.")
    echo: bool = Field(default=False, description="Show the prompt in front of the text, and in `logprobs`.")
    add_special_tokens: bool = Field(
        default=True, description="Begin the prompt with the tokens that the tokenizer puts there."
    )


class CompletionLogprobs(ResponseModel, kw_only=True):
    """An entry for each token. `text_offset`: characters of `text` before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionComplete(ResponseModel, kw_only=True):
    """`token_ids`, `prompt_token_ids`: with `return_token_ids`; in streams, a choice's first chunk has the latter.

    `member`: in streams with `include_members`.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    member: CompletedMember | UnsetType = UNSET


class CompletionFinal(ResponseModel, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage


class Chunk(ResponseModel, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage | UnsetType | None = UNSET
