"""`LLMChitChat`: small talk in the middle of a task."""

from llm_functionalities.model.model import Question
from llm_functionalities.services.context import CallContext, ModelClient
from llm_functionalities.services.prompts import alpaca, is_blank, labelled
from llm_functionalities.services.workflows.answers import speech_parser
from shared.stubs import llm_pb2, llm_pb2_grpc

MAX_TOKENS = 96
SENTENCES = 3
CHARACTERS = 300

INSTRUCTION = (
    "Reply to the user in a friendly way, in one or two short sentences. You are a voice assistant that helps people "
    "to cook and to do things around the house. Do not start a new task, and do not invent facts about the current one."
)

parse = speech_parser(sentences=SENTENCES, characters=CHARACTERS)


def prompt(request: llm_pb2.LLMChitChatRequest) -> str | None:
    """Returns None when the user has said nothing."""
    if is_blank(request.user_question) and is_blank(request.last_user_utterance):
        return None
    return alpaca(
        INSTRUCTION,
        labelled(
            ("Task", request.task_title),
            ("User", request.last_user_utterance),
            ("Assistant", request.last_agent_response),
            ("What the user wants", request.last_intent.replace("_", " ")),
            ("User", request.user_question),
        ),
    )


class LLMChitChat(llm_pb2_grpc.LLMChitChatServicer):
    def __init__(self, model: ModelClient) -> None:
        self._model = model

    async def generate_chit_chat(
        self, request: llm_pb2.LLMChitChatRequest, context: CallContext
    ) -> llm_pb2.ChitChatResponse:
        deadline = self._model.deadline(context, request.timeout)

        def ask() -> Question[str]:
            return Question(prompt(request), parse)

        answer = await self._model.answer(context, ask, self._model.generation(MAX_TOKENS), deadline)
        return llm_pb2.ChitChatResponse(text=answer.value or "")
