"""`LLMExecutionSearchManager`: decides whether a user who asks for something during a task wants another task."""

import re

from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.model.model import Question
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, with_images
from llm_functionalities.services.workflows.answers import first_object, speakable
from llm_functionalities.services.workflows.workflow import FirstChoice, Workflow
from shared.stubs import llm_pb2

# Assistants compare the decision with these names.
INTENTS = {
    "recommend_new_search": "the user wants to do something else",
    "continue_current_task": "what the user says belongs to the task",
    "ask_clarifying_question": "it could be either",
}

LONGEST_REPLY = 200

# More tokens than the longest object that the schema allows, so that no object is cut.
MAX_TOKENS = 288

INSTRUCTION = (
    "Decide what the user wants, who is in the middle of a task. Answer in JSON with the keys intent and ai_response. "
    "The intents are: recommend_new_search, if the user wants to do something else; continue_current_task, if what the "
    "user says belongs to the task; ask_clarifying_question, if it could be either. In ai_response, write the one "
    "sentence that the assistant says next."
)


def form(*intents: str) -> Grammar:
    """Returns the grammar of an answer with one of these intents."""
    return Grammar(
        json_schema={
            "type": "object",
            "properties": {
                "intent": {"type": "string", "enum": list(intents)},
                "ai_response": {"type": "string", "maxLength": LONGEST_REPLY},
            },
            "required": ["intent", "ai_response"],
            "additionalProperties": False,
        }
    )


DECISION = form(*INTENTS)

_DOMAINS = {llm_pb2.Session.COOKING: "cooking", llm_pb2.Session.DIY: "DIY"}
_INTENT = re.compile(rf"\b(?:{'|'.join(INTENTS)})\b")


def prompt(request: llm_pb2.ExecutionSearchRequest) -> str | None:
    """Returns the prompt; None if the request has no text and no image of the user."""
    return None if _says_nothing(request) else with_images(request.images, alpaca(INSTRUCTION, _situation(request)))


def choice(request: llm_pb2.ExecutionSearchRequest) -> llm_pb2.DecisionRequest | None:
    """Returns the decision about the intent; None if the request has no text and no image of the user."""
    if _says_nothing(request):
        return None
    options = [llm_pb2.DecisionOption(label=label, description=meaning) for label, meaning in INTENTS.items()]
    question = llm_pb2.DecisionQuestion(
        instructions="What does the user want, who is in the middle of a task?", choices=options
    )
    return llm_pb2.DecisionRequest(input=_situation(request), questions=[question], images=request.images)


def _says_nothing(request: llm_pb2.ExecutionSearchRequest) -> bool:
    return is_blank(request.user_question) and is_blank(request.last_user_response) and not request.images


def _situation(request: llm_pb2.ExecutionSearchRequest) -> str:
    return labelled(
        ("Domain", _DOMAINS.get(request.domain, "")),
        ("Task", request.taskmap.title),
        ("Description", request.taskmap.description),
        ("Assistant", request.last_last_agent_response),
        ("User", request.last_user_response),
        ("Assistant", request.last_agent_response),
        ("User", request.user_question),
    )


def parse(text: str) -> llm_pb2.ExecutionSearchResponse | None:
    """Returns the intent and reply of an answer; None without an intent. An intent without JSON counts, too."""
    found = first_object(text)
    if found is None:
        named = set(_INTENT.findall(text[:LONGEST_REPLY]))
        return llm_pb2.ExecutionSearchResponse(intent_classification=named.pop()) if len(named) == 1 else None
    intent, reply = found.get("intent"), found.get("ai_response")
    if not isinstance(intent, str) or intent not in INTENTS:
        return None
    said = speakable(reply, sentences=2, characters=LONGEST_REPLY) if isinstance(reply, str) else ""
    return llm_pb2.ExecutionSearchResponse(intent_classification=intent, ai_response=said)


def generate_decision(request: llm_pb2.ExecutionSearchRequest) -> Workflow[llm_pb2.ExecutionSearchResponse]:
    return Workflow(
        lambda _: Question(prompt(request), parse),
        lambda answers: answers[0].value or llm_pb2.ExecutionSearchResponse(),
        MAX_TOKENS,
        grammar=DECISION,
        first=FirstChoice(lambda: choice(request), form),
    )
