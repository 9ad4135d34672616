"""/v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import Items, LeftOut, RequestModel, ResponseModel, one_of, takes_options
from tgi_server.router.schemas.chat import ChatCompletionLogprob
from tgi_server.router.schemas.openai import TextParameters
from tgi_server.router.schemas.response_input import InputItem
from tgi_server.router.schemas.response_tools import ResponseTool, ToolSelection
from tgi_server.router.schemas.validation import BY_TYPE


class TextFormat(RequestModel):
    """The form of the answer."""

    harmless: ClassVar[frozenset[str]] = frozenset({"description"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    reported: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat = TextFormat()


class ReasoningOptions(RequestModel):
    """Reasoning is sent as it is, without summaries."""

    harmless: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: str | None = Field(default=None, description="How much to think, for templates that know it.")


class ContextEdit(LeftOut):
    """Compaction on the server: a conversation that becomes too long is refused instead."""

    known: ClassVar[frozenset[str]] = frozenset({"compaction"})


@takes_options(Dialect.RESPONSES)
class ResponsesRequest(TextParameters):
    harmless: ClassVar[frozenset[str]] = TextParameters.harmless | {
        *("access_programs", "background_options", "image", "max_tool_calls", "personality", "stream_options")
    }
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TextParameters.refused,
        "n": (1,),
        "prompt": (),
        "truncation": ("disabled",),
        # Of chats, which have other names here.
        **dict.fromkeys(("documents", "logprobs", "max_completion_tokens", "max_tokens", "messages"), ()),
        **dict.fromkeys(("reasoning_effort", "response_format", "structured_outputs"), ()),
        **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "regex"), ()),
    }

    model: str | None = Field(default=None, description="The name of an adapter, or of the model.")
    input: Annotated[str | Items[InputItem], BY_TYPE]
    instructions: str | None = Field(default=None, description="What the system says; for this response only.")
    previous_response_id: str | None = Field(default=None, description="The stored response that this one follows.")
    store: bool = Field(default=True, description="Store the response for later requests, as long as there is room.")
    stream: bool = False
    tools: Items[ResponseTool] | None = Field(default=None, description="Tools that the model may call.")
    tool_choice: Annotated[Literal["auto", "none", "required"] | ToolSelection | None, BY_TYPE] = "auto"
    context_management: Items[ContextEdit] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = TextOptions()
    reasoning: ReasoningOptions | None = None
    include: Items[str] | None = Field(default=None, description="`message.output_text.logprobs` asks for logprobs.")
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")

    @property
    def items(self) -> list[InputItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputItem.model_validate({"role": "user", "content": self.input})]
        return self.input


class InputTokensRequest(ResponsesRequest):
    """The body of /v1/responses/input_tokens. Fields that only affect the answer are ignored."""

    input: Annotated[str | Items[InputItem], BY_TYPE] = Field(default=[])


class OutputText(ResponseModel, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChatCompletionLogprob]


class ReasoningText(ResponseModel, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessageItem(ResponseModel, kw_only=True):
    type: Literal["message"] = "message"
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(ResponseModel, kw_only=True):
    type: Literal["reasoning"] = "reasoning"
    id: str
    status: str
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText]


class OutputFunctionCall(ResponseModel, kw_only=True):
    type: Literal["function_call"] = "function_call"
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class OutputFreeFormCall(ResponseModel, kw_only=True):
    """A call of a tool whose input is text."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


class OutputShellAction(ResponseModel, kw_only=True):
    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str]
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class OutputShellCall(ResponseModel, kw_only=True):
    type: Literal["local_shell_call"] = "local_shell_call"
    id: str
    status: str
    call_id: str
    action: OutputShellAction


AnyOutputItem = OutputMessageItem | OutputReasoning | OutputFunctionCall | OutputFreeFormCall | OutputShellCall
OutputItem = Annotated[
    Any, one_of(OutputMessageItem, OutputReasoning, OutputFunctionCall, OutputFreeFormCall, OutputShellCall)
]


class InputTokensDetails(ResponseModel, kw_only=True):
    cached_tokens: int


class OutputTokensDetails(ResponseModel, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(ResponseModel, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel, kw_only=True):
    reason: str


class ResponseObject(ResponseModel, kw_only=True):
    """OpenAI's object of a response. Members that repeat the request are as it has them."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    background: bool = False
    error: None = None
    model: str
    truncation: Literal["disabled"] = "disabled"
    instructions: str | None
    previous_response_id: str | None
    store: bool
    temperature: float | None
    top_p: float | None
    max_output_tokens: int | None
    top_logprobs: int | None
    tools: Any
    tool_choice: Any
    parallel_tool_calls: bool
    text: Any
    reasoning: Any
    metadata: Any
    user: str | None
    status: Literal["in_progress", "completed", "incomplete"]
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None


class ResponseEvent(ResponseModel, kw_only=True):
    """An event of a stream; which members it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChatCompletionLogprob] | UnsetType = UNSET


class DeletedResponse(ResponseModel, kw_only=True):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True


class CountedInput(ResponseModel, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItemList(ResponseModel, kw_only=True):
    """A page of the items that a stored response answers. `has_more`: there are items after the last of the page."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
