"""/v1/chat/completions and /chat_tokenize."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, RootModel, model_validator

from tgi_server.router.schemas.base import SEVERAL, Items, Name, RequestModel, ResponseModel, UnsignedInt
from tgi_server.router.schemas.generate import TokenizeResponse
from tgi_server.router.schemas.grammar import GrammarType
from tgi_server.router.schemas.openai import SharedParameters, Usage


class Url(RequestModel):
    url: str


class TextChunk(RequestModel):
    type: Literal["text"]
    text: str


class ImageChunk(RequestModel):
    """Known, and refused: the models served here read text only."""

    type: Literal["image_url"]
    image_url: Url


class MessageChunk(RootModel[Annotated[TextChunk | ImageChunk, Field(discriminator="type")]]):
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


class Tool(RequestModel):
    type: str
    function: FunctionDefinition


class ToolCall(RequestModel):
    """A call that the model made earlier in the conversation; `arguments` as an object or as a string of JSON."""

    id: str
    type: str = "function"
    function: FunctionDefinition


class MessageBody(RequestModel):
    content: MessageContent | None = None
    tool_calls: Items[ToolCall] | None = None


class Message(MessageBody):
    role: str
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs `content` or `tool_calls`")
        return self


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName


class ToolChoice(RootModel[Literal["auto", "none", "required"] | NamedTool]):
    """A tool's name alone, which TGI takes too, is the choice of that tool."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("auto", "none", "required"):
            return {"function": {"name": value}}
        return value


class ChatRequest(SharedParameters):
    messages: Items[Message] = Field(json_schema_extra=SEVERAL)
    logprobs: bool | None = Field(default=None, description="Report the logprob of each token.")
    top_logprobs: UnsignedInt | None = Field(
        default=None, description="Report so many most likely tokens at each position; needs `logprobs`."
    )
    max_completion_tokens: UnsignedInt | None = Field(default=None, description="OpenAI's newer name of `max_tokens`.")
    response_format: GrammarType | None = Field(default=None, description="Form that the answer must have.")
    tools: Items[Tool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(default=None, description="Whether it may, must, or must not call one.")
    tool_prompt: str | None = Field(default=None, description="What tells the model about the tools.")


class TextMessage(ResponseModel):
    role: str
    content: str
    tool_call_id: str | None = None


class CalledFunction(ResponseModel):
    name: str
    arguments: str


class MadeToolCall(ResponseModel):
    id: str
    type: str
    function: CalledFunction


class ToolCallMessage(ResponseModel):
    role: str
    content: None = None
    tool_calls: list[MadeToolCall]


class OutputMessage(RootModel[TextMessage | ToolCallMessage]):
    pass


class ChatCompletionTopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatCompletionLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[ChatCompletionTopLogprob]
    drafted: bool = Field(default=False, description="The token had been drafted; told in streams only.")


class ChatCompletionLogprobs(ResponseModel):
    content: list[ChatCompletionLogprob]


class ChatCompletionComplete(ResponseModel):
    index: UnsignedInt
    message: OutputMessage
    finish_reason: str
    logprobs: ChatCompletionLogprobs | None = None


class ChatCompletion(ResponseModel):
    object: Literal["chat.completion"]
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionComplete]
    usage: Usage


class Function(ResponseModel):
    name: str | None = None
    arguments: str


class DeltaToolCall(ResponseModel):
    index: UnsignedInt
    id: str
    type: str
    function: Function


class ToolCallDelta(ResponseModel):
    role: str
    tool_calls: list[DeltaToolCall]


class ChatCompletionDelta(RootModel[TextMessage | ToolCallDelta]):
    pass


class ChatCompletionChoice(ResponseModel):
    index: UnsignedInt
    delta: ChatCompletionDelta
    logprobs: ChatCompletionLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(ResponseModel):
    object: Literal["chat.completion.chunk"]
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionChoice]
    usage: Usage | None = None


class ChatTokenizeResponse(ResponseModel):
    tokenize_response: TokenizeResponse
    templated_text: str
