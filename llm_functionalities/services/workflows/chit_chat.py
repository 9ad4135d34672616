"""`LLMChitChat`: small talk in the middle of a task."""

from llm_functionalities.model.model import Question
from llm_functionalities.services.prompts import alpaca, is_blank, labelled, with_images
from llm_functionalities.services.workflows.answers import speech_parser
from llm_functionalities.services.workflows.workflow import Workflow
from shared.stubs import llm_pb2

MAX_TOKENS = 96
SENTENCES = 3
CHARACTERS = 300

INSTRUCTION = (
    "Reply to the user in a friendly way, in one or two short sentences. You are a voice assistant that helps people "
    "to cook and to do things around the house. Do not start a new task, and do not invent facts about the current one."
)

parse = speech_parser(sentences=SENTENCES, characters=CHARACTERS)


def prompt(request: llm_pb2.LLMChitChatRequest) -> str | None:
    """Returns the prompt; None if the request has no text and no image of the user."""
    if is_blank(request.user_question) and is_blank(request.last_user_utterance) and not request.images:
        return None
    text = alpaca(
        INSTRUCTION,
        labelled(
            ("Task", request.task_title),
            ("User", request.last_user_utterance),
            ("Assistant", request.last_agent_response),
            ("What the user wants", request.last_intent.replace("_", " ")),
            ("User", request.user_question),
        ),
    )
    return with_images(request.images, text)


def generate_chit_chat(request: llm_pb2.LLMChitChatRequest) -> Workflow[str]:
    return Workflow(
        lambda _: Question(prompt(request), parse),
        lambda answers: llm_pb2.ChitChatResponse(text=answers[0].value or ""),
        MAX_TOKENS,
    )
