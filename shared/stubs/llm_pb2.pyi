from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Session(_message.Message):
    __slots__ = ("turn", "task")
    class Domain(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Session.Domain]
        COOKING: _ClassVar[Session.Domain]
        DIY: _ClassVar[Session.Domain]
    UNKNOWN: Session.Domain
    COOKING: Session.Domain
    DIY: Session.Domain
    TURN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    turn: _containers.RepeatedCompositeFieldContainer[ConversationTurn]
    task: Task
    def __init__(self, turn: _Optional[_Iterable[_Union[ConversationTurn, _Mapping]]] = ..., task: _Optional[_Union[Task, _Mapping]] = ...) -> None: ...

class ConversationTurn(_message.Message):
    __slots__ = ("user_request",)
    USER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    user_request: UserRequest
    def __init__(self, user_request: _Optional[_Union[UserRequest, _Mapping]] = ...) -> None: ...

class UserRequest(_message.Message):
    __slots__ = ("interaction",)
    INTERACTION_FIELD_NUMBER: _ClassVar[int]
    interaction: InputInteraction
    def __init__(self, interaction: _Optional[_Union[InputInteraction, _Mapping]] = ...) -> None: ...

class InputInteraction(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("taskmap", "phase")
    class TaskPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DOMAIN: _ClassVar[Task.TaskPhase]
        PLANNING: _ClassVar[Task.TaskPhase]
        VALIDATING: _ClassVar[Task.TaskPhase]
        EXECUTING: _ClassVar[Task.TaskPhase]
        CLOSING: _ClassVar[Task.TaskPhase]
    DOMAIN: Task.TaskPhase
    PLANNING: Task.TaskPhase
    VALIDATING: Task.TaskPhase
    EXECUTING: Task.TaskPhase
    CLOSING: Task.TaskPhase
    TASKMAP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    taskmap: TaskMap
    phase: Task.TaskPhase
    def __init__(self, taskmap: _Optional[_Union[TaskMap, _Mapping]] = ..., phase: _Optional[_Union[Task.TaskPhase, str]] = ...) -> None: ...

class ScreenInteraction(_message.Message):
    __slots__ = ("paragraphs", "requirements")
    PARAGRAPHS_FIELD_NUMBER: _ClassVar[int]
    REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    paragraphs: _containers.RepeatedScalarFieldContainer[str]
    requirements: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, paragraphs: _Optional[_Iterable[str]] = ..., requirements: _Optional[_Iterable[str]] = ...) -> None: ...

class OutputInteraction(_message.Message):
    __slots__ = ("speech_text", "screen")
    SPEECH_TEXT_FIELD_NUMBER: _ClassVar[int]
    SCREEN_FIELD_NUMBER: _ClassVar[int]
    speech_text: str
    screen: ScreenInteraction
    def __init__(self, speech_text: _Optional[str] = ..., screen: _Optional[_Union[ScreenInteraction, _Mapping]] = ...) -> None: ...

class ExecutionStep(_message.Message):
    __slots__ = ("unique_id", "response", "active_duration_minutes", "total_duration_minutes")
    UNIQUE_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_DURATION_MINUTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DURATION_MINUTES_FIELD_NUMBER: _ClassVar[int]
    unique_id: str
    response: OutputInteraction
    active_duration_minutes: int
    total_duration_minutes: int
    def __init__(self, unique_id: _Optional[str] = ..., response: _Optional[_Union[OutputInteraction, _Mapping]] = ..., active_duration_minutes: _Optional[int] = ..., total_duration_minutes: _Optional[int] = ...) -> None: ...

class Requirement(_message.Message):
    __slots__ = ("name", "amount")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    amount: str
    def __init__(self, name: _Optional[str] = ..., amount: _Optional[str] = ...) -> None: ...

class TaskMap(_message.Message):
    __slots__ = ("taskmap_id", "title", "description", "requirement_list", "steps", "replaced_ingredients")
    TASKMAP_ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REQUIREMENT_LIST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REPLACED_INGREDIENTS_FIELD_NUMBER: _ClassVar[int]
    taskmap_id: str
    title: str
    description: str
    requirement_list: _containers.RepeatedCompositeFieldContainer[Requirement]
    steps: _containers.RepeatedCompositeFieldContainer[ExecutionStep]
    replaced_ingredients: _containers.RepeatedCompositeFieldContainer[ReplacedIngredient]
    def __init__(self, taskmap_id: _Optional[str] = ..., title: _Optional[str] = ..., description: _Optional[str] = ..., requirement_list: _Optional[_Iterable[_Union[Requirement, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[ExecutionStep, _Mapping]]] = ..., replaced_ingredients: _Optional[_Iterable[_Union[ReplacedIngredient, _Mapping]]] = ...) -> None: ...

class ExtraInfo(_message.Message):
    __slots__ = ("type", "text", "unique_id", "keyword", "image_url")
    class InfoType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TIP: _ClassVar[ExtraInfo.InfoType]
        WARNING: _ClassVar[ExtraInfo.InfoType]
        EXPLANATION: _ClassVar[ExtraInfo.InfoType]
        QUESTION: _ClassVar[ExtraInfo.InfoType]
        JOKE: _ClassVar[ExtraInfo.InfoType]
        PUN: _ClassVar[ExtraInfo.InfoType]
        EXTRADETAILS: _ClassVar[ExtraInfo.InfoType]
        FUNFACT: _ClassVar[ExtraInfo.InfoType]
    TIP: ExtraInfo.InfoType
    WARNING: ExtraInfo.InfoType
    EXPLANATION: ExtraInfo.InfoType
    QUESTION: ExtraInfo.InfoType
    JOKE: ExtraInfo.InfoType
    PUN: ExtraInfo.InfoType
    EXTRADETAILS: ExtraInfo.InfoType
    FUNFACT: ExtraInfo.InfoType
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYWORD_FIELD_NUMBER: _ClassVar[int]
    IMAGE_URL_FIELD_NUMBER: _ClassVar[int]
    type: ExtraInfo.InfoType
    text: str
    unique_id: str
    keyword: str
    image_url: str
    def __init__(self, type: _Optional[_Union[ExtraInfo.InfoType, str]] = ..., text: _Optional[str] = ..., unique_id: _Optional[str] = ..., keyword: _Optional[str] = ..., image_url: _Optional[str] = ...) -> None: ...

class Ingredient(_message.Message):
    __slots__ = ("name", "amount")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    amount: str
    def __init__(self, name: _Optional[str] = ..., amount: _Optional[str] = ...) -> None: ...

class ReplacedIngredient(_message.Message):
    __slots__ = ("original", "replacement")
    ORIGINAL_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    original: Ingredient
    replacement: Ingredient
    def __init__(self, original: _Optional[_Union[Ingredient, _Mapping]] = ..., replacement: _Optional[_Union[Ingredient, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "repetition_penalty", "frequency_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("formatted_prompt", "max_tokens", "timeout", "grammar", "adapter_id", "images", "sampling", "stop", "members")
    FORMATTED_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    formatted_prompt: str
    max_tokens: int
    timeout: int
    grammar: Grammar
    adapter_id: str
    images: _containers.RepeatedScalarFieldContainer[bytes]
    sampling: Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    members: bool
    def __init__(self, formatted_prompt: _Optional[str] = ..., max_tokens: _Optional[int] = ..., timeout: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter_id: _Optional[str] = ..., images: _Optional[_Iterable[bytes]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., members: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class ModelResponse(_message.Message):
    __slots__ = ("text", "finish_reason", "prompt_tokens", "generated_tokens", "member")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    member: Member
    def __init__(self, text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class ModelBatchRequest(_message.Message):
    __slots__ = ("formatted_prompts", "max_tokens", "timeout", "grammar", "adapter_id", "sampling", "stop")
    FORMATTED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    formatted_prompts: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    timeout: int
    grammar: Grammar
    adapter_id: str
    sampling: Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, formatted_prompts: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., timeout: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter_id: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelBatchResponse(_message.Message):
    __slots__ = ("text", "finish_reason", "prompt_tokens", "generated_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: _containers.RepeatedScalarFieldContainer[str]
    finish_reason: _containers.RepeatedScalarFieldContainer[str]
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    generated_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[_Iterable[str]] = ..., finish_reason: _Optional[_Iterable[str]] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., generated_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TGISummaryRequest(_message.Message):
    __slots__ = ("input_text",)
    INPUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    input_text: str
    def __init__(self, input_text: _Optional[str] = ...) -> None: ...

class TGISummaryResponse(_message.Message):
    __slots__ = ("summary_text",)
    SUMMARY_TEXT_FIELD_NUMBER: _ClassVar[int]
    summary_text: str
    def __init__(self, summary_text: _Optional[str] = ...) -> None: ...

class TGIMultipleSummaryRequest(_message.Message):
    __slots__ = ("input_text",)
    INPUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    input_text: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, input_text: _Optional[_Iterable[str]] = ...) -> None: ...

class TGIMultipleSummaryResponse(_message.Message):
    __slots__ = ("summary_text",)
    SUMMARY_TEXT_FIELD_NUMBER: _ClassVar[int]
    summary_text: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, summary_text: _Optional[_Iterable[str]] = ...) -> None: ...

class LLMChitChatRequest(_message.Message):
    __slots__ = ("last_user_utterance", "last_agent_response", "user_question", "task_title", "timeout", "last_intent", "images")
    LAST_USER_UTTERANCE_FIELD_NUMBER: _ClassVar[int]
    LAST_AGENT_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    USER_QUESTION_FIELD_NUMBER: _ClassVar[int]
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    LAST_INTENT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    last_user_utterance: str
    last_agent_response: str
    user_question: str
    task_title: str
    timeout: int
    last_intent: str
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, last_user_utterance: _Optional[str] = ..., last_agent_response: _Optional[str] = ..., user_question: _Optional[str] = ..., task_title: _Optional[str] = ..., timeout: _Optional[int] = ..., last_intent: _Optional[str] = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ChitChatResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class SummaryGenerationRequest(_message.Message):
    __slots__ = ("task_title", "step_text", "more_details")
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    STEP_TEXT_FIELD_NUMBER: _ClassVar[int]
    MORE_DETAILS_FIELD_NUMBER: _ClassVar[int]
    task_title: str
    step_text: str
    more_details: str
    def __init__(self, task_title: _Optional[str] = ..., step_text: _Optional[str] = ..., more_details: _Optional[str] = ...) -> None: ...

class SummaryGenerationResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: str
    def __init__(self, summary: _Optional[str] = ...) -> None: ...

class MultipleSummaryGenerationRequest(_message.Message):
    __slots__ = ("task_title", "step_text", "more_details")
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    STEP_TEXT_FIELD_NUMBER: _ClassVar[int]
    MORE_DETAILS_FIELD_NUMBER: _ClassVar[int]
    task_title: _containers.RepeatedScalarFieldContainer[str]
    step_text: _containers.RepeatedScalarFieldContainer[str]
    more_details: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, task_title: _Optional[_Iterable[str]] = ..., step_text: _Optional[_Iterable[str]] = ..., more_details: _Optional[_Iterable[str]] = ...) -> None: ...

class MultipleSummaryGenerationResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, summary: _Optional[_Iterable[str]] = ...) -> None: ...

class LLMDescriptionGenerationRequest(_message.Message):
    __slots__ = ("task_title", "ingredients")
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    INGREDIENTS_FIELD_NUMBER: _ClassVar[int]
    task_title: str
    ingredients: str
    def __init__(self, task_title: _Optional[str] = ..., ingredients: _Optional[str] = ...) -> None: ...

class DescriptionGenerationResponse(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: str
    def __init__(self, description: _Optional[str] = ...) -> None: ...

class LLMMultipleDescriptionGenerationRequest(_message.Message):
    __slots__ = ("task_title", "ingredients", "domains")
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    INGREDIENTS_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    task_title: _containers.RepeatedScalarFieldContainer[str]
    ingredients: _containers.RepeatedScalarFieldContainer[str]
    domains: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, task_title: _Optional[_Iterable[str]] = ..., ingredients: _Optional[_Iterable[str]] = ..., domains: _Optional[_Iterable[str]] = ...) -> None: ...

class MultipleDescriptionGenerationResponse(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, description: _Optional[_Iterable[str]] = ...) -> None: ...

class ProactiveQuestionGenerationRequest(_message.Message):
    __slots__ = ("task_title", "previous_steps", "current_step")
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_STEPS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_STEP_FIELD_NUMBER: _ClassVar[int]
    task_title: _containers.RepeatedScalarFieldContainer[str]
    previous_steps: _containers.RepeatedScalarFieldContainer[str]
    current_step: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, task_title: _Optional[_Iterable[str]] = ..., previous_steps: _Optional[_Iterable[str]] = ..., current_step: _Optional[_Iterable[str]] = ...) -> None: ...

class ProactiveQuestionGenerationResponse(_message.Message):
    __slots__ = ("questions",)
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    questions: _containers.RepeatedCompositeFieldContainer[ExtraInfo]
    def __init__(self, questions: _Optional[_Iterable[_Union[ExtraInfo, _Mapping]]] = ...) -> None: ...

class IngredientReplacementRequest(_message.Message):
    __slots__ = ("task_title", "user_question", "agent_response", "original_ingredient", "images")
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    USER_QUESTION_FIELD_NUMBER: _ClassVar[int]
    AGENT_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_INGREDIENT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    task_title: str
    user_question: str
    agent_response: str
    original_ingredient: Ingredient
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, task_title: _Optional[str] = ..., user_question: _Optional[str] = ..., agent_response: _Optional[str] = ..., original_ingredient: _Optional[_Union[Ingredient, _Mapping]] = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...

class IngredientReplacementResponse(_message.Message):
    __slots__ = ("new_ingredient",)
    NEW_INGREDIENT_FIELD_NUMBER: _ClassVar[int]
    new_ingredient: Ingredient
    def __init__(self, new_ingredient: _Optional[_Union[Ingredient, _Mapping]] = ...) -> None: ...

class AdjustedStepGenerationRequest(_message.Message):
    __slots__ = ("task_title", "step", "ingredient")
    TASK_TITLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INGREDIENT_FIELD_NUMBER: _ClassVar[int]
    task_title: str
    step: _containers.RepeatedCompositeFieldContainer[ExecutionStep]
    ingredient: _containers.RepeatedCompositeFieldContainer[ReplacedIngredient]
    def __init__(self, task_title: _Optional[str] = ..., step: _Optional[_Iterable[_Union[ExecutionStep, _Mapping]]] = ..., ingredient: _Optional[_Iterable[_Union[ReplacedIngredient, _Mapping]]] = ...) -> None: ...

class AdjustedStepGenerationResponse(_message.Message):
    __slots__ = ("step_text", "ids")
    STEP_TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    step_text: _containers.RepeatedScalarFieldContainer[str]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step_text: _Optional[_Iterable[str]] = ..., ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ExecutionSearchRequest(_message.Message):
    __slots__ = ("domain", "taskmap", "last_user_response", "last_agent_response", "user_question", "last_last_agent_response", "timeout", "images")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    TASKMAP_FIELD_NUMBER: _ClassVar[int]
    LAST_USER_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    LAST_AGENT_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    USER_QUESTION_FIELD_NUMBER: _ClassVar[int]
    LAST_LAST_AGENT_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    domain: Session.Domain
    taskmap: TaskMap
    last_user_response: str
    last_agent_response: str
    user_question: str
    last_last_agent_response: str
    timeout: int
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, domain: _Optional[_Union[Session.Domain, str]] = ..., taskmap: _Optional[_Union[TaskMap, _Mapping]] = ..., last_user_response: _Optional[str] = ..., last_agent_response: _Optional[str] = ..., user_question: _Optional[str] = ..., last_last_agent_response: _Optional[str] = ..., timeout: _Optional[int] = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExecutionSearchResponse(_message.Message):
    __slots__ = ("intent_classification", "ai_response")
    INTENT_CLASSIFICATION_FIELD_NUMBER: _ClassVar[int]
    AI_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    intent_classification: str
    ai_response: str
    def __init__(self, intent_classification: _Optional[str] = ..., ai_response: _Optional[str] = ...) -> None: ...

class DecisionOption(_message.Message):
    __slots__ = ("label", "description")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    label: str
    description: str
    def __init__(self, label: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class DecisionQuestion(_message.Message):
    __slots__ = ("instructions", "choices", "levels")
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    instructions: str
    choices: _containers.RepeatedCompositeFieldContainer[DecisionOption]
    levels: _containers.RepeatedCompositeFieldContainer[DecisionOption]
    def __init__(self, instructions: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[DecisionOption, _Mapping]]] = ..., levels: _Optional[_Iterable[_Union[DecisionOption, _Mapping]]] = ...) -> None: ...

class DecisionRequest(_message.Message):
    __slots__ = ("input", "questions", "timeout", "adapter_id", "images")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    input: str
    questions: _containers.RepeatedCompositeFieldContainer[DecisionQuestion]
    timeout: int
    adapter_id: str
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, input: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[DecisionQuestion, _Mapping]]] = ..., timeout: _Optional[int] = ..., adapter_id: _Optional[str] = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DecisionAnswer(_message.Message):
    __slots__ = ("probabilities", "label", "score", "confidence", "label_mass")
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    LABEL_MASS_FIELD_NUMBER: _ClassVar[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    label: str
    score: float
    confidence: float
    label_mass: float
    def __init__(self, probabilities: _Optional[_Iterable[float]] = ..., label: _Optional[str] = ..., score: _Optional[float] = ..., confidence: _Optional[float] = ..., label_mass: _Optional[float] = ...) -> None: ...

class DecisionResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[DecisionAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[DecisionAnswer, _Mapping]]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("texts", "dimensions", "prompt_name", "timeout")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    dimensions: int
    prompt_name: str
    timeout: int
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., dimensions: _Optional[int] = ..., prompt_name: _Optional[str] = ..., timeout: _Optional[int] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings",)
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("query", "texts", "timeout")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    query: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    timeout: int
    def __init__(self, query: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ..., timeout: _Optional[int] = ...) -> None: ...

class RankedText(_message.Message):
    __slots__ = ("index", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    score: float
    def __init__(self, index: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class RerankResponse(_message.Message):
    __slots__ = ("ranking",)
    RANKING_FIELD_NUMBER: _ClassVar[int]
    ranking: _containers.RepeatedCompositeFieldContainer[RankedText]
    def __init__(self, ranking: _Optional[_Iterable[_Union[RankedText, _Mapping]]] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("formatted_prompt", "ttl_seconds", "cache_key", "timeout", "adapter_id", "answer_tokens", "max_tokens", "grammar", "sampling", "stop")
    FORMATTED_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    formatted_prompt: str
    ttl_seconds: int
    cache_key: str
    timeout: int
    adapter_id: str
    answer_tokens: int
    max_tokens: int
    grammar: Grammar
    sampling: Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, formatted_prompt: _Optional[str] = ..., ttl_seconds: _Optional[int] = ..., cache_key: _Optional[str] = ..., timeout: _Optional[int] = ..., adapter_id: _Optional[str] = ..., answer_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "answer_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., answer_tokens: _Optional[int] = ...) -> None: ...
