"""The blocks that messages of Anthropic's interface consist of, as clients send them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, RootModel

from tgi_server.router.schemas.base import (
    Items,
    LeftOut,
    Name,
    Refused,
    RefusingModel,
    RequestModel,
    as_parts,
)
from tgi_server.router.schemas.validation import BY_TYPE

CACHED: frozenset[str] = frozenset({"cache_control"})


class TextBlock(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({*CACHED, "citations"})

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


class FileImage(Refused):
    """An image that was uploaded before."""

    reason = "no files are stored on this server; send the bytes as `base64`"

    type: Literal["file"]


class ImageBlock(RequestModel):
    """An image, for models that read images."""

    harmless: ClassVar[frozenset[str]] = frozenset({*CACHED, "transformations"})

    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage | FileImage, BY_TYPE]


class PlainTextSource(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"media_type"})

    type: Literal["text"]
    data: str


class NestedBlock(RootModel[Annotated[TextBlock | ImageBlock, BY_TYPE]]):
    """A block of a document."""


class ContentSource(RequestModel):
    type: Literal["content"]
    content: Annotated[Items[NestedBlock], BeforeValidator(as_parts, json_schema_input_type=str | Items[NestedBlock])]


class FileSource(Refused):
    """A PDF file, or a file that was uploaded before."""

    reason = "this server reads no files; send the document as `text` or `content`"

    type: Literal["base64", "url", "file"]


class QuotableBlock(RefusingModel):
    """Text that an answer could quote."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"citations": ({}, {"enabled": False})}
    harmless: ClassVar[frozenset[str]] = CACHED


class DocumentBlock(QuotableBlock):
    """A document, which is read as text, with its title and its context before it."""

    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource | FileSource, BY_TYPE]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(QuotableBlock):
    """A result of a search, which is read as text, with its title and its source before it."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]


class ThinkingBlock(RequestModel):
    """Thoughts that came before an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class IgnoredBlock(RequestModel):
    """A block that says nothing to the model: thoughts that only Anthropic can read, or a mark of its servers."""

    harmless: ClassVar[frozenset[str]] = frozenset({"data", "from", "to", "trigger"})

    type: Literal["redacted_thinking", "fallback"]


class CompactionBlock(RequestModel):
    """A summary of earlier turns, which is read as text."""

    harmless: ClassVar[frozenset[str]] = frozenset({*CACHED, "encrypted_content", "signature", "tool_changes"})

    type: Literal["compaction"]
    content: str = ""


class ToolUseBlock(RequestModel):
    """A call that the model made earlier in the conversation."""

    harmless: ClassVar[frozenset[str]] = frozenset({*CACHED, "caller", "toolset_name", "server_name"})

    type: Literal["tool_use", "mcp_tool_use"]
    id: str
    name: Name
    input: dict[str, Any] = Field(default={})


class ToolReference(RequestModel):
    """A tool that a search for tools has found; all tools are shown anyway."""

    harmless: ClassVar[frozenset[str]] = CACHED

    type: Literal["tool_reference"]
    tool_name: str


class LeftOutBlock(LeftOut):
    """A block of a tool that Anthropic's servers run."""

    known: ClassVar[frozenset[str]] = frozenset(
        {
            *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
            *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
            *("advisor_tool_result", "container_upload", "browser_state", "mcp_tool_listing"),
            *("tool_addition", "tool_removal"),
        }
    )


_AnyResult = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReference | LeftOutBlock


class ResultBlock(RootModel[Annotated[_AnyResult, BY_TYPE]]):
    """A part of what a tool returned."""


class ToolResultBlock(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({*CACHED, "toolset_name"})

    type: Literal["tool_result", "mcp_tool_result"]
    tool_use_id: str
    content: Annotated[
        Items[ResultBlock],
        BeforeValidator(as_parts, json_schema_input_type=str | Items[ResultBlock]),
    ] = Field(default=[])
    is_error: bool | None = None


_AnyBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | IgnoredBlock
    | CompactionBlock
    | ToolUseBlock
    | ToolResultBlock
    | LeftOutBlock
)


class ContentBlock(RootModel[Annotated[_AnyBlock, BY_TYPE]]):
    pass
