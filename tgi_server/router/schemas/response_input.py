"""The input of /v1/responses: messages, calls and their results, thoughts."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, RootModel

from tgi_server.router.media.images import Detail
from tgi_server.router.schemas.base import (
    Items,
    LeftOut,
    Name,
    Refused,
    RefusingModel,
    RequestModel,
    UnsignedInt,
    as_parts,
)
from tgi_server.router.schemas.response_tools import ResponseTool
from tgi_server.router.schemas.validation import BY_TYPE

_ITEM_NOTES = frozenset({"id", "status"})
_CALL_NOTES = _ITEM_NOTES | {"async", "caller"}


class TextPart(RequestModel):
    """A piece of text."""

    harmless: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(RequestModel):
    """A refusal of the assistant, instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class JsonPart(RequestModel):
    """An object, or a list of objects, which is read as JSON. Decisions have it."""

    type: Literal["input_json"]
    data: Annotated[dict[str, Any] | Items[dict[str, Any]], BY_TYPE]

    @property
    def text(self) -> str:
        return json.dumps(self.data, ensure_ascii=False, separators=(",", ":"))


class InputImage(RefusingModel):
    """An image, for models that read images."""

    refused: ClassVar[Any] = {"file_id": ()}
    harmless: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_image"]
    image_url: str = Field(description="A data URL, or one of a host of --allowed-media-domains.")
    detail: Detail = Field(
        default="auto", description="low: the image is scaled down to 512 pixels; the others: to what the model takes."
    )


class InputFile(Refused):
    reason: ClassVar[str] = "send its text"

    type: Literal["input_file"]


_Text = Annotated[TextPart | RefusalPart, BY_TYPE]
Content = Annotated[Items[_Text], BeforeValidator(as_parts, json_schema_input_type=str | Items[_Text])]
InputPart = Annotated[TextPart | RefusalPart | InputImage | InputFile, BY_TYPE]
# Texts and images.
MixedContent = Annotated[Items[InputPart], BeforeValidator(as_parts, json_schema_input_type=str | Items[InputPart])]


class InputMessage(RequestModel):
    harmless: ClassVar[frozenset[str]] = _ITEM_NOTES | {"phase"}

    type: Literal["message"] = "message"
    role: str
    content: MixedContent


class FunctionCall(RequestModel):
    """A call that the model made earlier in the conversation."""

    harmless: ClassVar[frozenset[str]] = _CALL_NOTES

    type: Literal["function_call"]
    call_id: str
    name: Name
    namespace: Name | None = None
    arguments: str


class ResponsesFreeFormCall(RequestModel):
    """An earlier call of a tool whose input is text."""

    harmless: ClassVar[frozenset[str]] = _CALL_NOTES

    type: Literal["custom_tool_call"]
    call_id: str
    name: Name
    namespace: Name | None = None
    input: str


class ShellAction(RequestModel):
    type: Literal["exec"] = "exec"
    command: Items[str]
    env: dict[str, str] = Field(default={})
    timeout_ms: UnsignedInt | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCall(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"status"})

    type: Literal["local_shell_call"]
    id: str | None = None
    call_id: str
    action: ShellAction


class CallOutput(RequestModel):
    """The result of a call."""

    harmless: ClassVar[frozenset[str]] = _ITEM_NOTES | {"caller", "name", "namespace"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: MixedContent


class LocalShellOutput(RequestModel):
    """The result of a call, which `id` names."""

    harmless: ClassVar[frozenset[str]] = frozenset({"status"})

    type: Literal["local_shell_call_output"]
    id: str | None = None
    call_id: str | None = None
    output: str


class ReasoningItem(RequestModel):
    """Thoughts that came before the next item."""

    harmless: ClassVar[frozenset[str]] = _ITEM_NOTES | {"encrypted_content"}

    type: Literal["reasoning"]
    content: Content | None = None
    summary: Content | None = None


class ItemReference(RequestModel):
    """An item of a stored response, or of its input."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class AdditionalTools(RequestModel):
    """Further tools, beside the tools of the request."""

    harmless: ClassVar[frozenset[str]] = frozenset({"id", "role"})

    type: Literal["additional_tools"]
    tools: Items[ResponseTool]


class LeftOutItem(LeftOut):
    """An item of a tool that OpenAI's servers run, or one that only they can read."""

    known: ClassVar[frozenset[str]] = frozenset(
        {
            *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
            *("computer_call", "computer_call_output", "shell_call", "shell_call_output", "apply_patch_call"),
            *("apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
            *("mcp_call", "tool_search_call", "tool_search_output", "compaction", "compaction_trigger"),
            *("configuration_update", "program", "program_output"),
        }
    )


AnyItem = (
    InputMessage
    | FunctionCall
    | ResponsesFreeFormCall
    | LocalShellCall
    | CallOutput
    | LocalShellOutput
    | ReasoningItem
    | ItemReference
    | AdditionalTools
    | LeftOutItem
)


class InputItem(RootModel[Annotated[AnyItem, BY_TYPE]]):
    pass
