"""/v1/chat/completions and /chat_tokenize."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, ConfigDict, Field, RootModel, model_validator

from tgi_server.router.media.images import Detail
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import (
    SEVERAL,
    Items,
    Refused,
    RefusingModel,
    RequestModel,
    ResponseModel,
    fault,
    one_of,
    takes_options,
)
from tgi_server.router.schemas.chat_tools import ChatTool, PastToolCall, ToolChoice
from tgi_server.router.schemas.generate import SimpleToken
from tgi_server.router.schemas.openai import CompletedMember, SharedParameters, Usage
from tgi_server.router.schemas.validation import BY_TYPE


class Url(RequestModel):
    """The place of an image."""

    url: str = Field(description="A data URL, or one of a host of --allowed-media-domains.")
    detail: Detail = Field(
        default="auto", description="low: the image is scaled down to 512 pixels; the others: to what the model takes."
    )


class TextChunk(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str
    volatile: bool = Field(
        default=False, description="It differs in each request, such as the time: move it after the last user's text."
    )


class ImageChunk(RequestModel):
    """An image, for models that read images."""

    harmless: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["image_url"]
    image_url: Url


class RefusalChunk(RequestModel):
    """A refusal of the assistant, instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class OtherChunk(Refused):
    reason: ClassVar[str] = "send its text"

    type: Literal["input_audio", "file"]


_AnyChunk = TextChunk | ImageChunk | RefusalChunk | OtherChunk


class MessageChunk(RootModel[Annotated[_AnyChunk, BY_TYPE]]):
    pass


class MessageContent(RootModel[Annotated[str | Items[MessageChunk], BY_TYPE]]):
    pass


_SAYING = ("content", "refusal", "tool_calls", "reasoning_content", "reasoning")


class MessageBody(RefusingModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"annotations"})
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"audio": (), "function_call": ()}

    reasoning_content: str | None = Field(
        default=None,
        validation_alias=AliasChoices("reasoning_content", "reasoning"),
        description="Thoughts before an answer; templates show them. Also called `reasoning`.",
    )
    content: MessageContent | None = None
    refusal: str | None = Field(default=None, description="Written instead of an answer.")
    tool_calls: Items[PastToolCall] | None = None


class Message(MessageBody):
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": [name]} for name in _SAYING]})

    role: str
    volatile: bool = Field(default=False, description="As for a text of `content`: all of its texts are.")
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not self.tool_calls and self.reasoning_content is None and self.refusal is None:
            raise fault("is missing: a message needs it, `tool_calls` or `reasoning_content`", "content")
        return self


@takes_options(Dialect.CHAT)
class ChatRequest(SharedParameters):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SharedParameters.refused,
        "add_special_tokens": (False,),
        "best_of": (1,),
        "echo": (False,),
    }

    messages: Items[Message] = Field(json_schema_extra=SEVERAL)
    logprobs: bool | None = Field(default=None, description="Report the logprob of each token.")
    tools: Items[ChatTool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(default=None, description="If the model may, must, or must not call one.")
    parallel_tool_calls: bool = Field(default=True, description="An answer may have several calls.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    documents: Items[dict[str, Any]] | None = Field(default=None, description="Documents that the template shows.")
    reasoning_effort: str | None = Field(
        default=None, description="How much to think, for templates that know it; `none`: not at all."
    )
    include_reasoning: bool = Field(default=True, description="Send the reasoning that comes before the answer.")
    add_generation_prompt: bool = Field(default=True, description="Have the template begin the answer.")
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message. Default: only if the assistant wrote it."
    )
    tool_prompt: str | None = Field(default=None, description="What tells the model about the tools.")


class CalledFunction(ResponseModel, kw_only=True):
    name: str
    arguments: str


class CalledFreeFormTool(ResponseModel, kw_only=True):
    name: str
    input: str


class MadeToolCall(ResponseModel, kw_only=True):
    """A call of a function, or of a tool whose input is text, with the type `custom`."""

    id: str
    type: str = "function"
    function: CalledFunction | UnsetType = UNSET
    custom: CalledFreeFormTool | UnsetType = UNSET


class TextMessage(ResponseModel, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class ToolCallMessage(ResponseModel, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeToolCall]


# Unions of structs, which msgspec documents only by what is said here.
OutputMessage = Annotated[Any, one_of(TextMessage, ToolCallMessage)]


class ChatCompletionTopLogprob(ResponseModel, kw_only=True):
    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatCompletionLogprob(ResponseModel, kw_only=True):
    """`drafted`: the token had been drafted; in streams only."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[ChatCompletionTopLogprob]
    drafted: bool | UnsetType = UNSET


class ChatCompletionLogprobs(ResponseModel, kw_only=True):
    content: list[ChatCompletionLogprob]


class ChatCompletionComplete(ResponseModel, kw_only=True):
    index: int
    message: OutputMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(ResponseModel, kw_only=True):
    """`prompt_token_ids`, and the `token_ids` of choices: with `return_token_ids`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionComplete]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class Function(ResponseModel, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class FreeFormPiece(ResponseModel, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class DeltaToolCall(ResponseModel, kw_only=True):
    """The first piece of a call has its id and the name. `custom`: of a tool whose input is text."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function | UnsetType = UNSET
    custom: FreeFormPiece | UnsetType = UNSET


class TextDelta(ResponseModel, kw_only=True):
    role: str | UnsetType = UNSET
    content: str


class ToolCallDelta(ResponseModel, kw_only=True):
    role: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall]


class ReasoningDelta(ResponseModel, kw_only=True):
    role: str | UnsetType = UNSET
    reasoning_content: str


# The first delta of a choice has the role.
ChatCompletionDelta = Annotated[Any, one_of(TextDelta, ToolCallDelta, ReasoningDelta)]


class ChatCompletionChoice(ResponseModel, kw_only=True):
    index: int
    delta: ChatCompletionDelta
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    member: CompletedMember | UnsetType = UNSET


class ChatCompletionChunk(ResponseModel, kw_only=True):
    """A chunk. With `return_token_ids`, the first one has `prompt_token_ids`, and each one its new `token_ids`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatTokenizeResponse(ResponseModel, kw_only=True):
    tokenize_response: list[SimpleToken]
    templated_text: str
