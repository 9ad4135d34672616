"""`LLMProactiveQuestionGeneration`: a question that keeps the talk going while somebody works on a step."""

from llm_functionalities.caller import Context, Front
from llm_functionalities.generation import Grammar
from llm_functionalities.model import Question
from llm_functionalities.prompts import alpaca
from llm_functionalities.workflows.fields import at, is_blank, labelled
from llm_functionalities.workflows.sentences import CLOSING, plain, split
from shared.stubs import llm_pb2, llm_pb2_grpc

MAX_TOKENS = 64
CHARACTERS = 160

INSTRUCTION = (
    "Ask the user one short question that fits the current step: about how the work goes, or about what has been made "
    "so far. It must be easy to answer, and must not ask for what the steps already say."
)

QUESTION = Grammar(regex=r"[A-Z][^?!.\n\"]{8,150}\?")


def prompt(title: str, previous: str, current: str) -> str | None:
    """None when nothing is known to ask about."""
    if is_blank(title) and is_blank(previous) and is_blank(current):
        return None
    return alpaca(INSTRUCTION, labelled(("Task", title), ("Previous steps", previous), ("Current step", current)))


def parse(text: str) -> str | None:
    """The first question of an answer."""
    questions = (sentence for sentence in split(plain(text)) if sentence.rstrip(CLOSING).endswith("?"))
    return next((question for question in questions if len(question) <= CHARACTERS), None)


class LLMProactiveQuestionGeneration(llm_pb2_grpc.LLMProactiveQuestionGenerationServicer):
    def __init__(self, front: Front) -> None:
        self._front = front

    async def generate_proactive_question(
        self, request: llm_pb2.ProactiveQuestionGenerationRequest, context: Context
    ) -> llm_pb2.ProactiveQuestionGenerationResponse:
        """One question for each title, in their order; its text is empty where there is none."""
        deadline = self._front.deadline(context)
        titles, previous, current = request.task_title, request.previous_steps, request.current_step

        def ask(place: int) -> Question[str]:
            return Question(prompt(at(titles, place), at(previous, place), at(current, place)), parse)

        generation = self._front.generation(MAX_TOKENS, QUESTION, wish=True)
        answers = await self._front.answers(context, max(len(titles), len(current)), ask, generation, deadline)
        kind = llm_pb2.ExtraInfo.QUESTION
        return llm_pb2.ProactiveQuestionGenerationResponse(
            questions=[llm_pb2.ExtraInfo(type=kind, text=answer.value or "") for answer in answers]
        )
