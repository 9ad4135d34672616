"""/v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, RootModel

from tgi_server.router.media.images import Detail
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import (
    Items,
    Name,
    RefusingModel,
    RequestModel,
    ResponseModel,
    ToolSchema,
    one_of,
    takes_options,
)
from tgi_server.router.schemas.chat import ChatCompletionLogprob
from tgi_server.router.schemas.openai import TextParameters


class TextPart(RequestModel):
    """A piece of text. Files are refused."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""


Content = Annotated[
    Items[TextPart],
    BeforeValidator(
        lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value,
        json_schema_input_type=str | Items[TextPart],
    ),
]


class InputImage(RefusingModel):
    """An image, for models that read images."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": ()}

    type: Literal["input_image"]
    image_url: str = Field(description="A data URL, or one of a host of --allowed-media-domains.")
    detail: Detail = Field(
        default="auto", description="low: the image is scaled down to 512 pixels; the others: to what the model takes."
    )


InputPart = Annotated[TextPart | InputImage, Field(discriminator="type")]

# Texts and images.
MixedContent = Annotated[
    Items[InputPart],
    BeforeValidator(
        lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value,
        json_schema_input_type=str | Items[InputPart],
    ),
]


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: str
    content: MixedContent


class FunctionCall(RequestModel):
    """A call that the model made earlier in the conversation."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class FunctionCallOutput(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: MixedContent


class ReasoningItem(RequestModel):
    """Thoughts that came before the next item."""

    type: Literal["reasoning"]
    content: Content | None = None
    summary: Content | None = None


def _typed(item: Any) -> Any:
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


class InputItem(
    RootModel[
        Annotated[
            Annotated[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem, Field(discriminator="type")],
            BeforeValidator(_typed),
        ]
    ]
):
    pass


class FunctionTool(RequestModel):
    """Tools of OpenAI's own, such as `web_search`, are refused."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: ToolSchema = Field(default=None, description="JSON schema of the arguments.")
    strict: bool | None = None


class ChosenFunction(RequestModel):
    type: Literal["function"]
    name: str


class AllowedFunctions(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[ChosenFunction] = Field(min_length=1)


class TextFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RefusingModel):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat()


class ReasoningOptions(RequestModel):
    effort: str | None = Field(default=None, description="How much to think, for templates that know it.")


@takes_options(Dialect.RESPONSES)
class ResponsesRequest(TextParameters):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TextParameters.refused,
        "background": (False,),
        "conversation": (),
        "n": (1,),
        "prompt": (),
        "truncation": ("disabled",),
        # Of chats, which have other names here.
        **dict.fromkeys(("documents", "logprobs", "max_completion_tokens", "max_tokens", "messages"), ()),
        **dict.fromkeys(("reasoning_effort", "response_format", "structured_outputs", "verbosity"), ()),
        **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "regex"), ()),
    }

    model: str | None = Field(default=None, description="The name of an adapter, or of the model.")
    input: str | Items[InputItem]
    instructions: str | None = Field(default=None, description="What the system says; for this response only.")
    previous_response_id: str | None = Field(default=None, description="The stored response that this one follows.")
    store: bool = Field(default=True, description="Keep the response for those that follow, as long as there is room.")
    stream: bool = False
    tools: Items[FunctionTool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | AllowedFunctions | None = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = TextOptions()
    reasoning: ReasoningOptions | None = None
    include: Items[str] | None = Field(default=None, description="`message.output_text.logprobs` asks for logprobs.")
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")


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
    arguments: str


OutputItem = Annotated[Any, one_of(OutputMessageItem, OutputReasoning, OutputFunctionCall)]


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
    logprobs: list[ChatCompletionLogprob] | UnsetType = UNSET


class DeletedResponse(ResponseModel, kw_only=True):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True
