"""/v1/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, RootModel

from tgi_server.router.schemas.base import Items, Off, On, ResponseModel, UnsignedInt
from tgi_server.router.schemas.openai import SharedParameters, Usage

# A prompt as tokens, which may be as long as a body can be.
PromptIds = Annotated[list[UnsignedInt], Field(min_length=1, max_length=10_000_000, fail_fast=True)]


def _several(prompt: Any) -> Any:
    """Returns a list of prompts, for one of them as well."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        return [prompt]
    return prompt


class Prompt(
    RootModel[
        Annotated[
            Items[str] | Items[PromptIds],
            BeforeValidator(_several, json_schema_input_type=str | Items[str] | PromptIds | Items[PromptIds]),
        ]
    ]
):
    """One prompt, or several, as text or as tokens."""


class CompletionRequest(SharedParameters):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SharedParameters.refused,
        # Of chats, which have a template, thoughts and tools.
        "chat_template_kwargs": ({},),
        "documents": ([],),
        "include_reasoning": (True,),
        "messages": ([],),
        "reasoning_effort": ("none",),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
    }

    prompt: Prompt
    suffix: str | None = Field(default=None, description="Not supported.")
    echo: Off = Field(default=False, description="Show the prompt in front of the text, and in `logprobs`.")
    add_special_tokens: On = Field(
        default=True, description="Begin the prompt with the tokens that the tokenizer puts there."
    )
    logprobs: UnsignedInt | None = Field(
        default=None, description="Report the logprob of each token, and so many likeliest in its place."
    )
    best_of: UnsignedInt | None = Field(
        default=None, description="Generate so many answers to each prompt, and show the likeliest `n` of them."
    )
    max_tokens: UnsignedInt | None = Field(
        default=None, description="Tokens to generate; unset: as many as fit; 0: none, `echo` and `logprobs` at most."
    )


class CompletionLogprobs(ResponseModel):
    """An entry for each token. text_offset: characters of `text` before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[UnsignedInt]


class CompletionComplete(ResponseModel):
    index: UnsignedInt
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None


class CompletionFinal(ResponseModel):
    object: Literal["text_completion"]
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage


class Chunk(ResponseModel):
    object: Literal["text_completion"]
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage | None = None


class Completion(RootModel[Chunk | CompletionFinal]):
    """Either of the two."""
