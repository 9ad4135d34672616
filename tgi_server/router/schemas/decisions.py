"""/v1/decisions, as the types of openai-python have it."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from pydantic import BeforeValidator, Field, RootModel, model_validator

from tgi_server.router.schemas.base import Items, Name, RequestModel, ResponseModel, as_parts, fault, one_of
from tgi_server.router.schemas.response_input import (
    CallOutput,
    FunctionCall,
    InputFile,
    InputImage,
    InputMessage,
    JsonPart,
    RefusalPart,
    ResponsesFreeFormCall,
    TextPart,
)
from tgi_server.router.schemas.validation import BY_TYPE

MOST_QUESTIONS = 400
MOST_OPTIONS = 255


DecisionPart = Annotated[TextPart | RefusalPart | JsonPart | InputImage | InputFile, BY_TYPE]
_Parts = Annotated[Items[DecisionPart], BeforeValidator(as_parts, json_schema_input_type=str | Items[DecisionPart])]


class DecisionMessage(InputMessage):
    content: _Parts  # type: ignore[assignment]  # more than the base class has, and frozen


class DecisionOutput(CallOutput):
    output: _Parts  # type: ignore[assignment]


class DecisionItem(
    RootModel[Annotated[DecisionMessage | FunctionCall | ResponsesFreeFormCall | DecisionOutput, BY_TYPE]]
):
    """A message, a call of a tool, or its output."""


_Instructions = Annotated[list[Annotated[TextPart | JsonPart, BY_TYPE]], Field(min_length=1, max_length=10_000)]


class _Question(RequestModel):
    name: Name | None = None
    instructions: Annotated[Annotated[str, Field(min_length=1)] | _Instructions, BY_TYPE]

    @property
    def text(self) -> str:
        """The instructions as text."""
        parts = self.instructions
        return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


class PredicateQuestion(_Question):
    """A question if a statement about the input is true."""

    type: Literal["predicate"]


class ChoiceOption(RequestModel):
    value: Annotated[Annotated[str, Field(min_length=1)] | bool, BY_TYPE]
    description: str | None = None


class ChoiceQuestion(_Question):
    """A question about the option that fits the input."""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=MOST_OPTIONS)]

    @model_validator(mode="after")
    def _unique(self) -> "ChoiceQuestion":
        seen = [(type(choice.value), choice.value) for choice in self.choices]
        if len(set(seen)) < len(seen):
            raise fault("has two choices with the same `value`; each must be unique", "choices")
        return self


class ScoreLevel(RequestModel):
    label: Annotated[str, Field(min_length=1)]
    description: str | None = None


class ScoreQuestion(_Question):
    """A question about the level, of several ordered ones, that fits the input."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MOST_OPTIONS)]

    @model_validator(mode="after")
    def _unique(self) -> "ScoreQuestion":
        if len({level.label for level in self.levels}) < len(self.levels):
            raise fault("has two levels with the same `label`; each must be unique", "levels")
        return self


AnyQuestion = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, BY_TYPE]


class DecisionsRequest(RequestModel):
    """The body of /v1/decisions. `scoring`, `normalization` and `min_label_mass` are this server's own."""

    harmless: ClassVar[frozenset[str]] = frozenset({"prompt_cache_options", "safety_identifier", "user"})

    model: Name | None = None
    scoring: Literal["labels", "sequences"] = Field(
        default="labels", description="sequences: the options' whole texts are scored, not one token for each."
    )
    normalization: Literal["none", "orders", "calibration"] = Field(
        default="none",
        description="orders: the mean over several orders of listing; calibration: relative to a neutral input.",
    )
    input: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[list[DecisionItem], Field(min_length=1, max_length=10_000)],
        BY_TYPE,
    ]
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
