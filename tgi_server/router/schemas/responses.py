"""/v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, RootModel

from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import (
    Items,
    Name,
    Off,
    On,
    RefusingModel,
    RequestModel,
    ResponseModel,
    ToolSchema,
    takes_options,
)
from tgi_server.router.schemas.openai import TextParameters


class TextPart(RequestModel):
    """A piece of text. Images and files are refused: the models served here read text only."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""


Content = Annotated[
    Items[TextPart],
    BeforeValidator(
        lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value,
        json_schema_input_type=str | Items[TextPart],
    ),
]


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: str
    content: Content


class FunctionCall(RequestModel):
    """A call that the model made earlier in the conversation."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class FunctionCallOutput(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


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
    store: On = Field(default=True, description="Keep the response for those that follow, as long as there is room.")
    stream: Off = False
    tools: Items[FunctionTool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | AllowedFunctions | None = "auto"
    parallel_tool_calls: On = True
    text: TextOptions | None = TextOptions()
    reasoning: ReasoningOptions | None = None
    include: Items[str] | None = Field(default=None, description="`message.output_text.logprobs` asks for logprobs.")
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")


class ResponseObject(ResponseModel):
    """OpenAI's object of a response."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None


class DeletedResponse(ResponseModel):
    id: str
    object: Literal["response.deleted"]
    deleted: bool
