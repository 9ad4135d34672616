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
    Name,
    RefusingModel,
    RequestModel,
    ResponseModel,
    ToolSchema,
    one_of,
    takes_options,
)
from tgi_server.router.schemas.generate import SimpleToken
from tgi_server.router.schemas.openai import SharedParameters, Usage


class Url(RequestModel):
    """The place of an image."""

    url: str = Field(description="A data URL, or one of a host of --allowed-media-domains.")
    detail: Detail = Field(
        default="auto", description="low: the image is scaled down to 512 pixels; the others: to what the model takes."
    )


class TextChunk(RequestModel):
    type: Literal["text"]
    text: str


class ImageChunk(RequestModel):
    """An image, for models that read images."""

    type: Literal["image_url"]
    image_url: Url


class RefusalChunk(RequestModel):
    """A refusal of the assistant, in place of an answer."""

    type: Literal["refusal"]
    refusal: str


class MessageChunk(RootModel[Annotated[TextChunk | ImageChunk | RefusalChunk, Field(discriminator="type")]]):
    pass


class MessageContent(RootModel[str | Items[MessageChunk]]):
    pass


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
        default=None, description="Refuse a JSON schema that cannot be fully enforced. Else a header names the rest."
    )


class ToolFunction(FunctionDefinition):
    arguments: ToolSchema = Field(
        default=None,
        validation_alias=AliasChoices("arguments", "parameters"),
        description="JSON schema of the arguments.",
    )


class Tool(RequestModel):
    type: str
    function: ToolFunction


class ToolCall(RequestModel):
    """A call that the model made earlier in the conversation; `arguments` as an object or as a string of JSON."""

    id: str
    type: str = "function"
    function: FunctionDefinition


class MessageBody(RefusingModel):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"audio": (), "function_call": ()}

    reasoning_content: str | None = Field(
        default=None,
        validation_alias=AliasChoices("reasoning_content", "reasoning"),
        description="Thoughts before an answer; templates show them. Also called `reasoning`.",
    )
    content: MessageContent | None = None
    tool_calls: Items[ToolCall] | None = None


class Message(MessageBody):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": [name]} for name in ("content", "tool_calls", "reasoning_content", "reasoning")]
        }
    )

    role: str
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("a message needs `content`, `tool_calls` or `reasoning_content`")
        return self


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedToolNames(RequestModel):
    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedTools(RequestModel):
    """Some of the tools; one of them may or must be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


class ToolChoice(RootModel[Literal["auto", "none", "required"] | NamedTool | AllowedTools]):
    """A tool's name alone, which TGI takes too, is the choice of that tool."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("auto", "none", "required"):
            return {"function": {"name": value}}
        return value


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
    tools: Items[Tool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(default=None, description="Whether it may, must, or must not call one.")
    parallel_tool_calls: bool = Field(default=True, description="An answer may have several calls.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    documents: Items[dict[str, Any]] | None = Field(default=None, description="Documents that the template shows.")
    reasoning_effort: str | None = Field(
        default=None, description="How much to think, for templates that know it; `none`: not at all."
    )
    include_reasoning: bool = Field(default=True, description="Send the thoughts that come before the answer.")
    add_generation_prompt: bool = Field(default=True, description="Have the template begin the answer.")
    continue_final_message: bool | None = Field(
        default=None, description="Go on with the last message; unset: if it is the assistant's."
    )
    tool_prompt: str | None = Field(default=None, description="What tells the model about the tools.")


class CalledFunction(ResponseModel, kw_only=True):
    name: str
    arguments: str


class MadeToolCall(ResponseModel, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


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


class ChatCompletion(ResponseModel, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionComplete]
    usage: Usage


class Function(ResponseModel, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class DeltaToolCall(ResponseModel, kw_only=True):
    """The first piece of a call has its id and the name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


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


class ChatCompletionChunk(ResponseModel, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatTokenizeResponse(ResponseModel, kw_only=True):
    tokenize_response: list[SimpleToken]
    templated_text: str
