"""Tools of /v1/responses."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, RootModel

from tgi_server.router.schemas.base import Items, LeftOut, Name, Refused, RequestModel, ToolSchema
from tgi_server.router.schemas.validation import BY_TYPE

_TOOL_NOTES = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})


class FunctionTool(RequestModel):
    harmless: ClassVar[frozenset[str]] = _TOOL_NOTES

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: ToolSchema = Field(default=None, description="JSON schema of the arguments.")
    strict: bool | None = None


class InputFormat(RequestModel):
    """The form of a text, which is enforced. A `lark` grammar is shown to the model, too."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


class ResponsesFreeFormTool(RequestModel):
    """A tool whose input is text."""

    harmless: ClassVar[frozenset[str]] = _TOOL_NOTES

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class LocalShellTool(RequestModel):
    """Runs commands on the client's machine."""

    type: Literal["local_shell"]


class ResponsesLeftOutTool(LeftOut):
    """A tool that OpenAI's servers run, or one whose calls this server could not show."""

    known: ClassVar[frozenset[str]] = frozenset(
        {
            *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
            *("file_search", "computer", "computer_use", "computer_use_preview", "code_interpreter", "mcp"),
            *("image_generation", "tool_search", "shell", "apply_patch", "programmatic_tool_calling"),
        }
    )


class NamespacedTool(RootModel[Annotated[FunctionTool | ResponsesFreeFormTool | ResponsesLeftOutTool, BY_TYPE]]):
    pass


class NamespaceTool(RequestModel):
    """Functions that the model calls by `<namespace>__<name>`."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Items[NamespacedTool]


_AnyTool = FunctionTool | ResponsesFreeFormTool | LocalShellTool | NamespaceTool | ResponsesLeftOutTool


class ResponseTool(RootModel[Annotated[_AnyTool, BY_TYPE]]):
    pass


class ChosenTool(RequestModel):
    """`namespace`: of the tool, if several have one of that name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ChosenLocalShell(RequestModel):
    type: Literal["local_shell"]


class ChosenNamespace(RequestModel):
    """All tools of a namespace."""

    type: Literal["namespace"]
    name: str


class LeftOutChoice(LeftOut):
    """A tool that was left out."""

    known: ClassVar[frozenset[str]] = ResponsesLeftOutTool.known


class AllowedTool(RootModel[Annotated[ChosenTool | ChosenLocalShell | ChosenNamespace | LeftOutChoice, BY_TYPE]]):
    pass


class ResponsesAllowedTools(RequestModel):
    """Some of the tools; one of them may or must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[AllowedTool] = Field(min_length=1)


class RefusedChoice(Refused):
    reason: ClassVar[str] = "such a tool cannot be called here"

    type: Literal[
        "file_search",
        "web_search",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "computer",
        "computer_use",
        "computer_use_preview",
        "image_generation",
        "code_interpreter",
        "mcp",
        "programmatic_tool_calling",
        "apply_patch",
        "shell",
    ]


_AnyChoice = ChosenTool | ChosenLocalShell | ChosenNamespace | ResponsesAllowedTools | RefusedChoice


class ToolSelection(RootModel[Annotated[_AnyChoice, BY_TYPE]]):
    pass
