"""The assistant's workflows from end to end."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from llm_functionalities.services.workflows import execution_search
from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.fakes.model_server import ModelServer
from tests.integration.llm_functionalities.contracts import messages
from tests.integration.llm_functionalities.service import running_service
from tests.timing import until

COOKING = llm_pb2.Session.COOKING


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture(scope="module")
def channel(shared_server: ModelServer) -> Iterator[grpc.Channel]:
    with running_service("--endpoint", shared_server.url) as service, service.channel() as channel:
        yield channel


@pytest.fixture
def server(shared_server: ModelServer) -> ModelServer:
    shared_server.fault, shared_server.delay = None, 0.0
    shared_server.requests.clear()
    return shared_server


def step(unique_id: str, text: str) -> llm_pb2.ExecutionStep:
    return llm_pb2.ExecutionStep(unique_id=unique_id, response=llm_pb2.OutputInteraction(speech_text=text))


def test_chit_chat(channel: grpc.Channel, server: ModelServer) -> None:
    server.answer = "I am well, thank you! Shall we go on? And then I"
    request = llm_pb2.LLMChitChatRequest(user_question="How are you?", task_title="Pancakes")
    response = llm_pb2_grpc.LLMChitChatStub(channel).generate_chit_chat(request)
    assert response.text == "I am well, thank you! Shall we go on?"
    assert "User: How are you?" in server.requests[0].prompt
    assert "Task: Pancakes" in server.requests[0].prompt


def test_summaries(channel: grpc.Channel, server: ModelServer) -> None:
    stub = llm_pb2_grpc.LLMSummaryGenerationStub(channel)
    server.answer = lambda prompt: "Fry it. Half a sent" if "Step: a" in prompt else "Whisk it."
    request = llm_pb2.SummaryGenerationRequest(task_title="T", step_text="a", more_details="b")
    assert stub.generate_summary(request).summary == "Fry it."
    requests = llm_pb2.MultipleSummaryGenerationRequest(task_title=["T"], step_text=["b", " ", "a"], more_details=["d"])
    assert list(stub.generate_summaries(requests).summary) == ["Whisk it.", "", "Fry it."]


def test_descriptions(channel: grpc.Channel, server: ModelServer) -> None:
    stub = llm_pb2_grpc.LLMDescriptionGenerationStub(channel)
    server.answer = lambda prompt: "" if "soup" in prompt else "A fine cake."
    request = llm_pb2.LLMDescriptionGenerationRequest(task_title="cake", ingredients="flour")
    assert stub.generate_description(request).description == "A fine cake."
    requests = llm_pb2.LLMMultipleDescriptionGenerationRequest(task_title=["soup", "cake"], domains=["COOKING"])
    assert list(stub.generate_descriptions(requests).description) == ["", "A fine cake."]


def test_proactive_questions(channel: grpc.Channel, server: ModelServer) -> None:
    stub = llm_pb2_grpc.LLMProactiveQuestionGenerationStub(channel)
    server.answer = lambda prompt: "Is it hot? Yes." if "Step 2" in prompt else "No question."
    request = llm_pb2.ProactiveQuestionGenerationRequest(
        task_title=["T", "T", "T"], previous_steps=["Step 0", "Step 1"], current_step=["Step 1", "Step 2"]
    )
    questions = stub.generate_proactive_question(request).questions
    assert [question.text for question in questions] == ["", "Is it hot?", ""]
    assert all(question.type == llm_pb2.ExtraInfo.QUESTION for question in questions)
    assert server.requests[0].body["parameters"]["grammar"]["type"] == "regex"


def test_replacement(channel: grpc.Channel, server: ModelServer) -> None:
    stub = llm_pb2_grpc.LLMReplacementGenerationStub(channel)
    server.answer = json.dumps({"name": "oat milk", "amount": "200 ml"})
    request = llm_pb2.IngredientReplacementRequest(
        user_question="What instead of milk?", original_ingredient=llm_pb2.Ingredient(name="milk", amount="200 ml")
    )
    response = stub.generate_replacement(request)
    assert (response.new_ingredient.name, response.new_ingredient.amount) == ("oat milk", "200 ml")
    assert server.requests[0].body["parameters"]["grammar"]["type"] == "json"
    server.answer = ' "oat milk", "amount": "200 ml"}'  # half an object, as of a server that ignores the grammar
    response, call = stub.generate_replacement.with_call(request)
    assert not response.HasField("new_ingredient")
    assert dict(call.trailing_metadata())["empty-reason"] == "unusable"


def test_steps_are_rewritten_where_the_ingredient_is(channel: grpc.Channel, server: ModelServer) -> None:
    stub = llm_pb2_grpc.LLMReplacementGenerationStub(channel)
    server.answer = lambda prompt: "Whisk the oat milk." if "Whisk" in prompt else "Pour the milk."
    pair = llm_pb2.ReplacedIngredient(
        original=llm_pb2.Ingredient(name="milk"), replacement=llm_pb2.Ingredient(name="oat milk", amount="1 cup")
    )
    request = llm_pb2.AdjustedStepGenerationRequest(
        task_title="T",
        step=[step("1", "Whisk the milk."), step("2", "Sift the flour."), step("3", "Pour the milk.")],
        ingredient=[pair],
    )
    response = stub.rewrite_steps(request)
    assert list(response.ids) == ["1", "2", "3"]
    assert list(response.step_text) == ["Whisk the oat milk.", "Sift the flour.", ""]
    assert len(server.requests) == 2


# A session as an assistant declares it, with more fields than this service knows, in messages of every depth.
SESSION_OF_AN_ASSISTANT = """
Session: session_id=1 string, turn=2 repeated Turn, task=3 Task, headless=6 int32, greetings=900 string
Turn: user_request=1 Request, agent_response=2 string, id=3 string
Request: interaction=3 Input, user_id=2 string
Input: text=1 string, intents=2 repeated string
Task: taskmap=1 TaskMap, state=2 string, phase=3 int32
TaskMap: title=2 string, date=3 string, description=5 string, requirement_list=12 repeated Requirement, \
steps=16 repeated Step, replaced_ingredients=30 repeated Replaced, difficulty=26 string
Requirement: unique_id=1 string, name=4 string, amount=5 string, linked_taskmap_id=6 string
Step: unique_id=1 string, response=3 Output, extra=90 string
Output: speech_text=1 string, screen=5 Screen, reprompt=13 string
Screen: headline=2 string, paragraphs=3 repeated string, buttons=8 repeated string, requirements=10 repeated string
Replaced: original=1 Ingredient, replacement=2 Ingredient
Ingredient: name=1 string, amount=2 string
"""


def test_a_session_comes_back_with_its_ingredient_replaced_and_all_else_as_it_was(
    channel: grpc.Channel, server: ModelServer
) -> None:
    kind = messages(SESSION_OF_AN_ASSISTANT)["Session"]
    server.answer = "Whisk the oat milk."
    whisk = {"speech_text": "Whisk the milk.", "reprompt": "Well?"}
    whisk["screen"] = {
        "headline": "1",
        "paragraphs": ["Whisk the milk."],
        "buttons": ["Next"],
        "requirements": ["milk"],
    }
    session = kind(
        session_id="7",
        headless=1,
        greetings="Hi",
        turn=[
            {"id": "a", "user_request": {"interaction": {"text": "I have no milk", "intents": ["X"]}, "user_id": "u"}},
            {"id": "b", "user_request": {"interaction": {"text": "yes"}}, "agent_response": "Good."},
        ],
        task={
            "phase": 2,
            "state": "s",
            "taskmap": {
                "title": "Pancakes",
                "date": "2024-01-01",
                "description": "Fine pancakes.",
                "difficulty": "easy",
                "requirement_list": [{"unique_id": "r", "name": "milk", "amount": "1 l", "linked_taskmap_id": "l"}],
                "steps": [{"unique_id": "1", "response": whisk, "extra": "e"}],
                "replaced_ingredients": [{"original": {"name": "milk"}, "replacement": {"name": "oat milk"}}],
            },
        },
    )
    call = channel.unary_unary(
        "/LLMReplacementGeneration/adjust_step_texts",
        request_serializer=kind.SerializeToString,
        response_deserializer=kind.FromString,
    )
    taskmap = session.task.taskmap
    answered = call(session)
    taskmap.steps[0].response.speech_text = taskmap.steps[0].response.screen.paragraphs[0] = "Whisk the oat milk."
    taskmap.steps[0].response.screen.requirements[0] = taskmap.requirement_list[0].name = "oat milk"
    assert answered == session
    assert "Task: Pancakes" in server.requests[0].prompt


def test_a_task_is_described_by_its_description(channel: grpc.Channel, server: ModelServer) -> None:
    kinds = messages(
        """
        Request: taskmap=2 TaskMap, user_question=5 string
        TaskMap: date=3 string, description=5 string
        """
    )
    call = channel.unary_unary(
        "/LLMExecutionSearchManager/generate_decision", request_serializer=kinds["Request"].SerializeToString
    )
    call(kinds["Request"](taskmap={"date": "2024-01-01", "description": "Fine pancakes."}, user_question="Pizza!"))
    assert "Description: Fine pancakes." in server.requests[0].prompt
    assert "2024" not in server.requests[0].prompt


def test_decisions(channel: grpc.Channel, server: ModelServer) -> None:
    stub = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
    server.answer = json.dumps({"intent": "recommend_new_search", "ai_response": "Shall we look for pizza?"})
    request = llm_pb2.ExecutionSearchRequest(
        domain=COOKING, taskmap=llm_pb2.TaskMap(title="Pancakes"), user_question="I want pizza", timeout=10_000
    )
    response = stub.generate_decision(request)
    assert response.intent_classification == "recommend_new_search"
    assert response.ai_response == "Shall we look for pizza?"
    assert "Task: Pancakes" in server.requests[0].prompt


def _decided(**changes: Any) -> dict[str, Any]:
    sure = {"type": "choice", "choice": "continue_current_task", "confidence": 0.9, "label_mass": 0.9}
    probabilities = [{"value": each, "probability": 1 / 3} for each in execution_search.INTENTS]
    return sure | {"probabilities": probabilities} | changes


def test_an_intent_that_the_model_is_sure_of_is_the_only_one_it_may_write() -> None:
    request = llm_pb2.ExecutionSearchRequest(user_question="Next!", timeout=10_000)
    with ModelServer() as server, running_service("--endpoint", server.url) as service, service.channel() as channel:
        server.answer = json.dumps({"intent": "continue_current_task", "ai_response": "Whisk the eggs."})
        stub = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
        for decision, intents in (
            (_decided(), ["continue_current_task"]),
            (_decided(confidence=0.2), list(execution_search.INTENTS)),
            (_decided(label_mass=0.2), list(execution_search.INTENTS)),
            ({"type": "refusal", "label_mass": 0.9}, list(execution_search.INTENTS)),
        ):
            server.decision = decision
            response, call = stub.generate_decision.with_call(request)
            assert response.intent_classification == "continue_current_task"
            assert "empty-reason" not in dict(call.trailing_metadata())
            schema = server.requests[-1].body["parameters"]["grammar"]["value"]
            assert schema["properties"]["intent"]["enum"] == intents
        assert len(server.requests) == 4


def test_a_server_without_decisions_is_not_asked_for_them_again() -> None:
    request = llm_pb2.ExecutionSearchRequest(user_question="Next!", timeout=10_000)
    with ModelServer() as server, running_service("--endpoint", server.url) as service, service.channel() as channel:
        server.answer = json.dumps({"intent": "continue_current_task"})
        stub = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
        assert {stub.generate_decision(request).intent_classification for _ in range(3)} == {"continue_current_task"}
        assert server.decisions_asked == 1
        stub.generate_decision(llm_pb2.ExecutionSearchRequest())
        assert len(server.requests) == 3


def test_a_server_that_takes_no_grammars_is_asked_without_and_its_answers_are_parsed() -> None:
    request = llm_pb2.ExecutionSearchRequest(user_question="I want pizza", timeout=10_000)
    with ModelServer() as server, running_service("--endpoint", server.url) as service, service.channel() as channel:
        server.fault = "no grammars"
        server.answer = 'Sure! {"intent": "recommend_new_search", "ai_response": "Shall we look for pizza?"}'
        stub = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
        responses = [stub.generate_decision(request) for _ in range(4)]
        assert {each.intent_classification for each in responses} == {"recommend_new_search"}
        with_grammar = ["grammar" in each.body["parameters"] for each in server.requests]
        assert with_grammar == [True, False, False, False, False]
        (line,) = (line for line in service.log if "does not support grammars" in line)
        assert "grammar is not supported" in line
        strict = llm_pb2.ModelRequest(formatted_prompt="x", grammar=llm_pb2.Grammar(regex="yes|no"), timeout=10_000)
        _, call = llm_pb2_grpc.LLMRunnerStub(channel).call_model.with_call(strict)
        assert dict(call.trailing_metadata())["empty-reason"] == "rejected"


@pytest.mark.parametrize(
    "refusal",
    [
        (422, "Input validation error: the grammar cannot be used: compiling it takes more than 2 s"),
        (422, "Input validation error: the grammar could not be followed: lexer error"),
        (429, "the grammar cannot be compiled now: too many grammars are waiting to be compiled; try again soon"),
    ],
)
def test_one_grammar_that_is_refused_says_nothing_about_others(
    channel: grpc.Channel, server: ModelServer, refusal: tuple[int, str]
) -> None:
    """A call is answered without its refused grammar; the next one is sent with its grammar to a healthy server."""
    request = llm_pb2.ExecutionSearchRequest(user_question="I want pizza", timeout=10_000)
    server.fault, server.refusal = "no grammars", refusal
    server.answer = '{"intent": "recommend_new_search", "ai_response": "Shall we look for pizza?"}'
    stub = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
    responses = [stub.generate_decision(request) for _ in range(8)]
    assert {each.intent_classification for each in responses} == {"recommend_new_search"}
    assert ["grammar" in each.body["parameters"] for each in server.requests] == [True, False] * 8


def test_a_prompt_that_is_refused_without_its_grammar_too_says_nothing_about_grammars(
    channel: grpc.Channel, server: ModelServer
) -> None:
    stub = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
    request = llm_pb2.ExecutionSearchRequest(user_question="I want pizza", timeout=10_000)
    server.fault, server.sick = 422, False
    _, call = stub.generate_decision.with_call(request)
    assert dict(call.trailing_metadata())["empty-reason"] == "rejected"
    server.fault = None
    server.answer = "x"
    stub.generate_decision(request)
    assert "grammar" in server.requests[-1].body["parameters"]


SESSION = llm_pb2.Session(
    task=llm_pb2.Task(
        phase=llm_pb2.Task.VALIDATING,
        taskmap=llm_pb2.TaskMap(
            steps=[step("1", "Whisk the milk.")],
            replaced_ingredients=[
                llm_pb2.ReplacedIngredient(
                    original=llm_pb2.Ingredient(name="milk"), replacement=llm_pb2.Ingredient(name="oat milk")
                )
            ],
        ),
    )
)
CALLS: dict[str, tuple[Callable[[grpc.Channel], Any], Any, Any]] = {
    "chit chat": (
        lambda channel: llm_pb2_grpc.LLMChitChatStub(channel).generate_chit_chat,
        llm_pb2.LLMChitChatRequest(user_question="Hi"),
        llm_pb2.ChitChatResponse(),
    ),
    "summary": (
        lambda channel: llm_pb2_grpc.LLMSummaryGenerationStub(channel).generate_summary,
        llm_pb2.SummaryGenerationRequest(step_text="Stir."),
        llm_pb2.SummaryGenerationResponse(),
    ),
    "summaries": (
        lambda channel: llm_pb2_grpc.LLMSummaryGenerationStub(channel).generate_summaries,
        llm_pb2.MultipleSummaryGenerationRequest(step_text=["Stir.", "Fry."]),
        llm_pb2.MultipleSummaryGenerationResponse(summary=["", ""]),
    ),
    "description": (
        lambda channel: llm_pb2_grpc.LLMDescriptionGenerationStub(channel).generate_description,
        llm_pb2.LLMDescriptionGenerationRequest(task_title="Cake"),
        llm_pb2.DescriptionGenerationResponse(),
    ),
    "descriptions": (
        lambda channel: llm_pb2_grpc.LLMDescriptionGenerationStub(channel).generate_descriptions,
        llm_pb2.LLMMultipleDescriptionGenerationRequest(task_title=["Cake"]),
        llm_pb2.MultipleDescriptionGenerationResponse(description=[""]),
    ),
    "question": (
        lambda channel: llm_pb2_grpc.LLMProactiveQuestionGenerationStub(channel).generate_proactive_question,
        llm_pb2.ProactiveQuestionGenerationRequest(current_step=["Stir."]),
        llm_pb2.ProactiveQuestionGenerationResponse(questions=[llm_pb2.ExtraInfo(type=llm_pb2.ExtraInfo.QUESTION)]),
    ),
    "replacement": (
        lambda channel: llm_pb2_grpc.LLMReplacementGenerationStub(channel).generate_replacement,
        llm_pb2.IngredientReplacementRequest(original_ingredient=llm_pb2.Ingredient(name="milk")),
        llm_pb2.IngredientReplacementResponse(),
    ),
    "step": (
        lambda channel: llm_pb2_grpc.LLMReplacementGenerationStub(channel).rewrite_steps,
        llm_pb2.AdjustedStepGenerationRequest(
            step=[step("1", "Whisk the milk.")],
            ingredient=[llm_pb2.ReplacedIngredient(original=llm_pb2.Ingredient(name="milk"))],
        ),
        llm_pb2.AdjustedStepGenerationResponse(step_text=[""], ids=["1"]),
    ),
    "session": (
        lambda channel: llm_pb2_grpc.LLMReplacementGenerationStub(channel).adjust_step_texts,
        SESSION,
        SESSION,
    ),
    "decision": (
        lambda channel: llm_pb2_grpc.LLMExecutionSearchManagerStub(channel).generate_decision,
        llm_pb2.ExecutionSearchRequest(user_question="Pizza!"),
        llm_pb2.ExecutionSearchResponse(),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("failure", ["says nothing", "cut off", "broken"])
def test_without_a_usable_answer_the_response_is_empty(
    name: str, failure: str, channel: grpc.Channel, server: ModelServer
) -> None:
    method, request, empty = CALLS[name]
    server.answer = {"says nothing": "", "cut off": '{"name": "oat mi', "broken": "x"}[failure]
    server.fault, server.sick = ("garbage" if failure == "broken" else None), False
    assert method(channel)(request) == empty
    server.fault = None
    server.answer = "Fine."
    stub = llm_pb2_grpc.LLMRunnerStub(channel)
    until(lambda: stub.call_model(llm_pb2.ModelRequest(formatted_prompt="x")).text == "Fine.")


@pytest.mark.parametrize("name", CALLS)
def test_a_request_with_nothing_in_it_is_answered_with_nothing(
    name: str, channel: grpc.Channel, server: ModelServer
) -> None:
    method, request, empty = CALLS[name]
    assert method(channel)(type(request)()) == type(empty)()
    assert not server.requests


def test_a_time_out_of_a_workflow_holds(channel: grpc.Channel, server: ModelServer) -> None:
    server.delay = 5
    chat = llm_pb2_grpc.LLMChitChatStub(channel)
    decide = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
    assert chat.generate_chit_chat(llm_pb2.LLMChitChatRequest(user_question="Hi", timeout=100), timeout=4).text == ""
    request = llm_pb2.ExecutionSearchRequest(user_question="Pizza!", timeout=100)
    assert decide.generate_decision(request, timeout=4).intent_classification == ""
    until(lambda: all(request.abandoned.is_set() for request in server.requests))
