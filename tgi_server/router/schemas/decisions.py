"""/v1/decisions, as the types of openai-python have it, and /v1/systemone, as `transformers serve` has it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from pydantic import BeforeValidator, Field, RootModel, model_validator
from pydantic_core import PydanticCustomError, to_json

from tgi_server.router.schemas.base import Items, Name, RefusingModel, RequestModel, ResponseModel, one_of
from tgi_server.router.schemas.response_input import CallOutput, FunctionCall, InputMessage

MOST_QUESTIONS = 400
MOST_OPTIONS = 255


def _part(part: Any) -> Any:
    """Returns a part of a content in the form that /v1/responses has for it."""
    if not isinstance(part, dict):
        return part
    match part.get("type"):
        case "input_json":
            return {"type": "input_text", "text": _json(part.get("data"))}
        case "refusal":
            return {"type": "refusal", "text": part.get("refusal")}
    return part


def _json(data: Any) -> str:
    if not isinstance(data, dict) and not (isinstance(data, list) and all(isinstance(each, dict) for each in data)):
        raise PydanticCustomError("data", "must have an object, or a list of objects, as `data`")
    return to_json(data).decode()


def _item(item: Any) -> Any:
    """Returns an item of the input in the form that /v1/responses has for it."""
    if not isinstance(item, dict):
        return item
    simple = {"type": "message", **item} if "role" in item else dict(item)
    for name in ("content", "output"):
        if isinstance(simple.get(name), list):
            simple[name] = list(map(_part, simple[name]))
    if simple.get("type") == "custom_tool_call":
        simple |= {"type": "function_call", "arguments": to_json({"input": simple.get("input")}).decode()}
    if simple.get("type") == "custom_tool_call_output":
        simple["type"] = "function_call_output"
    return simple


class DecisionItem(
    RootModel[
        Annotated[
            Annotated[InputMessage | FunctionCall | CallOutput, Field(discriminator="type")],
            BeforeValidator(_item),
        ]
    ]
):
    """A message, a call of a tool, or its output."""


def _instructions(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    parts = [_part(part) for part in value]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise PydanticCustomError("instructions", "must be a text, or a list of `input_text` and `input_json` parts")
    return "\n".join(part["text"] for part in parts)


_Instructions = Annotated[
    str, BeforeValidator(_instructions, json_schema_input_type=str | Items[dict[str, Any]]), Field(min_length=1)
]


class _Question(RequestModel):
    name: Name | None = None
    instructions: _Instructions


class PredicateQuestion(_Question):
    """Is a statement about the input true?"""

    type: Literal["predicate"]


class ChoiceOption(RequestModel):
    value: Annotated[str, Field(min_length=1)] | bool
    description: str | None = None


class ChoiceQuestion(_Question):
    """Which option fits the input?"""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=MOST_OPTIONS)]

    @model_validator(mode="after")
    def _unique(self) -> "ChoiceQuestion":
        seen = [(type(each.value), each.value) for each in self.choices]
        if len(set(seen)) < len(seen):
            raise PydanticCustomError("choices", "has two choices with the same `value`; each must be unique")
        return self


class ScoreLevel(RequestModel):
    label: Annotated[str, Field(min_length=1)]
    description: str | None = None


class ScoreQuestion(_Question):
    """Which level, of those in order, fits the input?"""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MOST_OPTIONS)]

    @model_validator(mode="after")
    def _unique(self) -> "ScoreQuestion":
        if len({each.label for each in self.levels}) < len(self.levels):
            raise PydanticCustomError("levels", "has two levels with the same `label`; each must be unique")
        return self


AnyQuestion = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class _Decided(RefusingModel):
    model: Name | None = None
    scoring: Literal["labels", "sequences"] = Field(
        default="labels", description="sequences: the options' whole texts are scored, not one token for each."
    )
    normalization: Literal["none", "orders", "calibration"] = Field(
        default="none",
        description="orders: the mean over several orders of listing; calibration: relative to a neutral input.",
    )


class DecisionsRequest(_Decided):
    """The body of /v1/decisions. `scoring`, `normalization` and `min_label_mass` are this server's own."""

    harmless: ClassVar[frozenset[str]] = frozenset({"prompt_cache_options", "safety_identifier", "user"})

    input: Annotated[str, Field(min_length=1)] | Annotated[list[DecisionItem], Field(min_length=1, max_length=10_000)]
    questions: Annotated[list[AnyQuestion], Field(min_length=1, max_length=MOST_QUESTIONS)]
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Inputs are computed again for another key."
    )
    min_label_mass: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="A question whose labels are less likely together gets a refusal."
    )


class PredicateAnswer(ResponseModel, kw_only=True):
    type: Literal["predicate"] = "predicate"
    name: str | None
    probability: float
    label_mass: float


class ChoiceProbability(ResponseModel, kw_only=True):
    value: str | bool
    probability: float


class ChoiceAnswer(ResponseModel, kw_only=True):
    type: Literal["choice"] = "choice"
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]
    label_mass: float


class ScoreProbability(ResponseModel, kw_only=True):
    label: str
    value: int
    probability: float


class ScoreAnswer(ResponseModel, kw_only=True):
    type: Literal["score"] = "score"
    name: str | None
    score: Annotated[float, Meta(description="the expected level; the first is 0")]
    confidence: float
    probabilities: list[ScoreProbability]
    label_mass: float


class RefusalAnswer(ResponseModel, kw_only=True):
    type: Literal["refusal"] = "refusal"
    name: str | None
    label_mass: float


class DecisionUsageDetails(ResponseModel, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class DecisionUsage(ResponseModel, kw_only=True):
    input_tokens: int
    input_tokens_details: DecisionUsageDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Decision(ResponseModel, kw_only=True):
    """`label_mass`: the probability of all labels together, among all tokens."""

    answers: list[Annotated[Any, one_of(PredicateAnswer, ChoiceAnswer, ScoreAnswer, RefusalAnswer)]]
    model: str
    usage: DecisionUsage


_Content = str | dict[str, Any] | list[Any]


class NoulQuestion(RequestModel):
    type: Literal["noul"]
    instructions: _Content | None = None
    criteria: dict[Literal["true", "false"], _Content | None] | None = None


class SystemOneChoice(RequestModel):
    type: Literal["choice"]
    instructions: _Content | None = None
    criteria: Annotated[dict[str, _Content | None], Field(min_length=2, max_length=MOST_OPTIONS)]


class SystemOneScore(RequestModel):
    type: Literal["score"]
    instructions: _Content | None = None
    criteria: Annotated[list[_Content], Field(min_length=2, max_length=MOST_OPTIONS)]


SystemOneQuestion = Annotated[NoulQuestion | SystemOneChoice | SystemOneScore, Field(discriminator="type")]


class SystemOneRequest(_Decided):
    """The body of /v1/systemone."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"assets": ({},)}

    state: _Content
    questions: Annotated[dict[str, SystemOneQuestion], Field(min_length=1, max_length=MOST_QUESTIONS)]


class SystemOneUsage(ResponseModel, kw_only=True):
    input_tokens: int
    output_tokens: int


class SystemOneResponse(ResponseModel, kw_only=True):
    model: str
    answers: dict[str, dict[str, Any]]
    usage: SystemOneUsage
