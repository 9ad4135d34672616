"""/v1/messages, as Anthropic's clients know it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, ConfigDict, Field, RootModel

from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import (
    SEVERAL,
    Items,
    Name,
    Off,
    RefusingModel,
    RequestModel,
    ResponseModel,
    ToolSchema,
    UnsignedInt,
    one_of,
    takes_options,
)


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str


class Base64Image(RequestModel):
    """The bytes of an image."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlImage(RequestModel):
    """The URL of an image, which is a data URL, or one of a host of --allowed-media-domains."""

    type: Literal["url"]
    url: str


class ImageBlock(RequestModel):
    """An image, for models that read images."""

    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage, Field(discriminator="type")]


class DocumentBlock(RequestModel):
    """Known, and refused."""

    type: Literal["document"]
    source: Any = None


class ThinkingBlock(RequestModel):
    """Thoughts that came before an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(RequestModel):
    """Thoughts that only Anthropic can read; they are ignored."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestModel):
    """A call that the model made earlier in the conversation."""

    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]


class ResultBlock(RootModel[Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]]):
    """A part of what a tool returned."""


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Items[ResultBlock],
        BeforeValidator(_as_blocks, json_schema_input_type=str | Items[ResultBlock]),
    ] = Field(default=[])
    is_error: bool | None = None


class ContentBlock(
    RootModel[
        Annotated[
            TextBlock
            | ImageBlock
            | DocumentBlock
            | ThinkingBlock
            | RedactedThinkingBlock
            | ToolUseBlock
            | ToolResultBlock,
            Field(discriminator="type"),
        ]
    ]
):
    pass


class InputTurn(RequestModel):
    role: Literal["user", "assistant"]
    content: Annotated[
        Items[ContentBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | Items[ContentBlock])
    ]


class OfferedTool(RequestModel):
    """A function that the model may call. Tools that Anthropic runs, such as web search, are refused."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: ToolSchema = Field(default=None, description="JSON schema of the arguments.")
    strict: bool | None = None


class ToolSelection(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="The tool to call; with the type `tool`.")
    disable_parallel_tool_use: Off = False


class ThinkingOptions(RequestModel):
    """`adaptive`: the model decides how much to think; so does a model without thoughts."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: UnsignedInt | None = Field(
        default=None, description="Tokens of thoughts, which are closed then; with the type `enabled`."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted`: thoughts are not sent. They are never summarized."
    )


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: str | None = Field(default=None, description="How much to think, for templates that know it.")
    format: OutputFormat | None = Field(default=None, description="Form that the answer must have.")


class MessagesParameters(RefusingModel):
    """What /v1/messages and /v1/messages/count_tokens have in common."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "compaction": (),
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "thread": (),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            *("billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo"),
            *("metadata", "service_tier", "speed", "user_profile_id", "workspace_id"),
        }
    )

    model: str | None = Field(default=None, description="The name of an adapter, or of the model.")
    messages: Items[InputTurn] = Field(json_schema_extra=SEVERAL)
    system: Annotated[
        Items[TextBlock] | None, BeforeValidator(_as_blocks, json_schema_input_type=str | Items[TextBlock] | None)
    ] = Field(default=None, description="What the system says.")
    tools: Items[OfferedTool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolSelection | None = Field(default=None, description="Whether it may, must, or must not call one.")
    thinking: ThinkingOptions | None = Field(default=None, description="Whether to think; unset: no.")
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")


@takes_options(Dialect.MESSAGES)
class CountTokensRequest(MessagesParameters):
    """Parameters of a generation are ignored."""


@takes_options(Dialect.MESSAGES)
class MessagesRequest(MessagesParameters):
    model_config = ConfigDict(json_schema_extra={"required": ["messages", "max_tokens"]})

    stream: Off = False


class SentText(ResponseModel, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class SentThinking(ResponseModel, kw_only=True):
    """The signature is empty: nobody checks it."""

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
    """`input_tokens` does not count those that had been computed for another prompt (`cache_read_input_tokens`)."""

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


class BlockDelta(ResponseModel, kw_only=True):
    """A piece of a block: of its text, its thoughts, or the arguments of a call."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
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


class MessageStop(ResponseModel, kw_only=True):
    type: Literal["message_stop"] = "message_stop"


class CountedTokens(ResponseModel, kw_only=True):
    input_tokens: int


class AnthropicError(ResponseModel, kw_only=True):
    type: str
    message: str


class AnthropicErrorResponse(ResponseModel, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicError
