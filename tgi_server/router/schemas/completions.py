"""/v1/completions."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, RootModel

from tgi_server.router.schemas.base import Items, ResponseModel, UnsignedInt
from tgi_server.router.schemas.openai import SharedParameters, Usage


class Prompt(
    RootModel[
        Annotated[
            Items[str],
            BeforeValidator(
                lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | Items[str]
            ),
        ]
    ]
):
    """One prompt, or several."""


class CompletionRequest(SharedParameters):
    prompt: Prompt
    suffix: str | None = Field(default=None, description="Not supported.")
    echo: bool = Field(default=False, description="Not supported.")
    logprobs: UnsignedInt | None = Field(default=None, description="Not supported; chat completions have them.")
    best_of: UnsignedInt | None = Field(default=None, description="Not supported beyond 1; /generate has it.")


class CompletionComplete(ResponseModel):
    index: UnsignedInt
    text: str
    finish_reason: str | None
    logprobs: list[float] | None = None


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
