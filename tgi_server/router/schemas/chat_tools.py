"""Tools of chats: functions, and tools whose input is text."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, RootModel, model_validator

from tgi_server.router.schemas.base import Items, LeftOut, Name, RequestModel, ToolSchema
from tgi_server.router.schemas.validation import BY_TYPE


class FunctionDefinition(RequestModel):
    """A function that the model may call; OpenAI calls `arguments` `parameters`."""

    name: Name
    description: str | None = None
    arguments: Any = Field(
        default=None,
        validation_alias=AliasChoices("arguments", "parameters"),
        description="JSON schema of the arguments.",
    )
    strict: bool | None = Field(
        default=None,
        description="Refuse a JSON schema that cannot be fully enforced. Otherwise a header names the rest.",
    )


class ToolFunction(FunctionDefinition):
    arguments: ToolSchema = Field(
        default=None,
        validation_alias=AliasChoices("arguments", "parameters"),
        description="JSON schema of the arguments.",
    )


class Tool(RequestModel):
    type: Literal["function"] = "function"
    function: ToolFunction


class InputGrammar(RequestModel):
    syntax: Literal["lark", "regex"]
    definition: str


class FreeFormat(RequestModel):
    type: Literal["text", "grammar"] = "text"
    grammar: InputGrammar | None = None


class FreeFormTool(RequestModel):
    """A tool whose input is text. format: the form of the text; by default any text."""

    name: Name
    description: str | None = None
    format: FreeFormat | None = None


class OfferedFreeForm(RequestModel):
    type: Literal["custom"]
    custom: FreeFormTool


class LeftOutTool(LeftOut):
    """A tool that only its vendor's servers run."""


class ChatTool(RootModel[Annotated[Tool | OfferedFreeForm | LeftOutTool, BY_TYPE]]):
    pass


class CalledFreeForm(RequestModel):
    name: Name
    input: str


class ToolCall(RequestModel):
    """A call that the model made earlier in the conversation; `arguments` as an object or as a string of JSON."""

    id: str
    type: str = "function"
    function: FunctionDefinition


class FreeFormCall(RequestModel):
    """A call of a tool whose input is text."""

    id: str
    type: Literal["custom"]
    custom: CalledFreeForm


class PastToolCall(RootModel[Annotated[ToolCall | FreeFormCall, BY_TYPE]]):
    pass


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName


class NamedFreeForm(RequestModel):
    type: Literal["custom"]
    custom: FunctionName


class AllowedToolNames(RequestModel):
    mode: Literal["auto", "required"] = "auto"
    tools: Items[Annotated[NamedTool | NamedFreeForm, BY_TYPE]] = Field(min_length=1)


class AllowedTools(RequestModel):
    """Some of the tools; one of them may or must be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


_AnyChoice = Literal["auto", "none", "required"] | NamedTool | NamedFreeForm | AllowedTools


class ToolChoice(RootModel[Annotated[_AnyChoice, BY_TYPE]]):
    """A tool's name alone, which TGI takes too, is the choice of that tool."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("auto", "none", "required"):
            return {"function": {"name": value}}
        return value
