"""/v1/messages, as Anthropic's clients know it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, RootModel

from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import (
    SEVERAL,
    Items,
    LeftOut,
    Name,
    RefusingModel,
    RequestModel,
    ResponseModel,
    ToolSchema,
    UnsignedInt,
    as_parts,
    one_of,
    takes_options,
)
from tgi_server.router.schemas.context_management import AppliedEdits, ContextManagement, OriginalTokens
from tgi_server.router.schemas.message_blocks import ContentBlock, TextBlock
from tgi_server.router.schemas.validation import BY_TYPE


class InputTurn(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"output_config"})

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Items[ContentBlock], BeforeValidator(as_parts, json_schema_input_type=str | Items[ContentBlock])
    ] = Field(default=[])
    clear_at: Literal["next_user_message", "never"] = Field(
        default="never", description="With `next_user_message` the system's message is left out after that."
    )


_TOOL_NOTES = frozenset({"allowed_callers", "cache_control", "defer_loading"})


class OfferedTool(RequestModel):
    """A function that the model may call."""

    harmless: ClassVar[frozenset[str]] = frozenset({*_TOOL_NOTES, "eager_input_streaming"})

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: ToolSchema = Field(default=None, description="JSON schema of the arguments.")
    input_examples: Items[dict[str, Any]] = Field(default=[], description="Arguments that the description shows.")
    strict: bool | None = None


class MessagesClientTool(RequestModel):
    """A tool of Anthropic's that the client runs: its description and schema are known here."""

    harmless: ClassVar[frozenset[str]] = frozenset({*_TOOL_NOTES, "input_examples", "max_characters"})

    type: Literal[
        "bash_20241022",
        "bash_20250124",
        "text_editor_20241022",
        "text_editor_20250124",
        "text_editor_20250429",
        "text_editor_20250728",
        "memory_20250818",
    ]
    name: Name
    strict: bool | None = None


class MessagesLeftOutTool(LeftOut):
    """A tool that Anthropic's servers run, or one whose results this server could not show."""

    known: ClassVar[frozenset[str]] = frozenset(
        {
            *("web_search_20250305", "web_search_20260209", "web_search_20260318"),
            *("web_fetch_20250910", "web_fetch_20260209", "web_fetch_20260309", "web_fetch_20260318"),
            *("code_execution_20250522", "code_execution_20250825", "code_execution_20260120"),
            *("code_execution_20260521", "advisor_20260301", "mcp_toolset", "browser_toolset_20260801"),
            *("tool_search_tool_bm25", "tool_search_tool_bm25_20251119"),
            *("tool_search_tool_regex", "tool_search_tool_regex_20251119"),
            *("computer_20241022", "computer_20250124", "computer_20251124", "computer_toolset_20260801"),
        }
    )


class MessageTool(RootModel[Annotated[OfferedTool | MessagesClientTool | MessagesLeftOutTool, BY_TYPE]]):
    pass


class MessagesToolSelection(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="The tool to call; with the type `tool`.")
    disable_parallel_tool_use: bool = False


class ThinkingOptions(RequestModel):
    """`adaptive`: the model decides how much to think; so does a model without thoughts."""

    harmless: ClassVar[frozenset[str]] = frozenset({"block_binding"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: UnsignedInt | None = Field(
        default=None, description="Maximum number of thinking tokens; then thinking is closed. For the type `enabled`."
    )
    display: Literal["summarized", "updates", "omitted"] | None = Field(
        default=None, description="`omitted`: thoughts are not sent. They are never summarized."
    )


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    effort: str | None = Field(default=None, description="How much to think, for templates that know it.")
    format: OutputFormat | None = Field(default=None, description="Form that the answer must have.")


class MessagesParameters(RefusingModel):
    """The fields that /v1/messages and /v1/messages/count_tokens have in common."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "thread": (),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            *("betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks"),
            *("inference_geo", "metadata", "service_tier", "speed", "user_profile_id", "workspace_id"),
        }
    )

    model: str | None = Field(default=None, description="The name of an adapter, or of the model.")
    messages: Items[InputTurn] = Field(json_schema_extra=SEVERAL)
    system: Annotated[
        Items[TextBlock] | None, BeforeValidator(as_parts, json_schema_input_type=str | Items[TextBlock] | None)
    ] = Field(default=None, description="What the system says.")
    tools: Items[MessageTool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: MessagesToolSelection | None = Field(
        default=None, description="If the model may, must, or must not call one."
    )
    thinking: ThinkingOptions | None = Field(default=None, description="If the model thinks. Default: it does not.")
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = Field(
        default=None, description="Edits of the conversation that are made before the model reads it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")


@takes_options(Dialect.MESSAGES)
class CountTokensRequest(MessagesParameters):
    """Parameters of a generation are ignored."""

    harmless: ClassVar[frozenset[str]] = MessagesParameters.harmless | {"compaction"}


@takes_options(Dialect.MESSAGES, "max_tokens")
class MessagesRequest(MessagesParameters):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**MessagesParameters.refused, "compaction": ()}

    stream: bool = False


class SentText(ResponseModel, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class SentThinking(ResponseModel, kw_only=True):
    """The signature is opaque, and is not checked when it comes back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class SentToolUse(ResponseModel, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Any


SentBlock = Annotated[Any, one_of(SentText, SentThinking, SentToolUse)]


class MessagesUsage(ResponseModel, kw_only=True):
    """`input_tokens` leaves out the tokens that had been computed for another prompt (`cache_read_input_tokens`)."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class SentMessage(ResponseModel, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[SentBlock] = msgspec.field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    context_management: AppliedEdits | UnsetType = UNSET


class BlockDelta(ResponseModel, kw_only=True):
    """A piece of a block's text, of its reasoning or the reasoning's signature, or of the arguments of a call."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class MessageEnd(ResponseModel, kw_only=True):
    stop_reason: str
    stop_sequence: str | None


class MessageStart(ResponseModel, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: SentMessage


class BlockStart(ResponseModel, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: SentBlock


class BlockPiece(ResponseModel, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: BlockDelta


class BlockStop(ResponseModel, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageChange(ResponseModel, kw_only=True):
    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessagesUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(ResponseModel, kw_only=True):
    type: Literal["message_stop"] = "message_stop"


class Ping(ResponseModel, kw_only=True):
    """An event that keeps the connection open: after the start of a message, and while nothing else is sent."""

    type: Literal["ping"] = "ping"


class CountedTokens(ResponseModel, kw_only=True):
    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


class AnthropicError(ResponseModel, kw_only=True):
    """`details`: shows a client which field to leave out."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicErrorResponse(ResponseModel, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicError
