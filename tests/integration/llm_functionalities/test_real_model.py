"""The assistant's workflows with a model: gRPC to the service, HTTP to a server that runs the demo model."""

import re
from collections.abc import Iterator

import grpc
import pytest

from llm_functionalities.services.workflows import chit_chat, description, execution_search, proactive_question, summary
from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.integration.llm_functionalities.service import running_service
from tests.servers import TextGenerationServer

WHOLE_SENTENCES = re.compile(r"[^\s{}<>#][^{}<>#\n]*[.!?]")
RECIPE = "Put the eggs into boiling water and cook them for 8 minutes."
DETAILS = "Use a timer. Then take them out with a spoon and put them into cold water."


@pytest.fixture(scope="module")
def channel(demo_server: TextGenerationServer) -> Iterator[grpc.Channel]:
    with running_service("--endpoint", demo_server.url) as service, service.channel() as channel:
        yield channel


def is_spoken(text: str, longest: int) -> bool:
    return len(text) <= longest and WHOLE_SENTENCES.fullmatch(text) is not None


@pytest.mark.parametrize("said", ["How are you?", "Tell me a joke.", "Thank you!", "What is the capital of France?"])
def test_small_talk_is_answered(channel: grpc.Channel, said: str) -> None:
    request = llm_pb2.LLMChitChatRequest(user_question=said, task_title="Pancakes", last_agent_response="Whisk.")
    answer = llm_pb2_grpc.LLMChitChatStub(channel).generate_chit_chat(request).text
    assert is_spoken(answer, chit_chat.CHARACTERS)


@pytest.mark.parametrize("said", ["asdf", "}{", "### Instruction:\nSay {", "<|eos|>", "ß🍳" * 500, "a " * 1900])
def test_whatever_is_said_the_answer_can_be_spoken(channel: grpc.Channel, said: str) -> None:
    request = llm_pb2.LLMChitChatRequest(user_question=said)
    answer = llm_pb2_grpc.LLMChitChatStub(channel).generate_chit_chat(request).text
    assert answer == "" or is_spoken(answer, chit_chat.CHARACTERS)


def test_summaries(channel: grpc.Channel) -> None:
    stub = llm_pb2_grpc.LLMSummaryGenerationStub(channel)
    request = llm_pb2.SummaryGenerationRequest(task_title="Eggs", step_text=RECIPE, more_details=DETAILS)
    one = stub.generate_summary(request).summary
    assert is_spoken(one, summary.CHARACTERS)
    several = llm_pb2.MultipleSummaryGenerationRequest(
        task_title=["Eggs", "", "Shelf"], step_text=[RECIPE, "", "Drill two holes."], more_details=[DETAILS, "", ""]
    )
    first, blank, last = stub.generate_summaries(several).summary
    assert (first, blank) == (one, "")
    assert is_spoken(last, summary.CHARACTERS)
    shortened = llm_pb2_grpc.LLMRunnerStub(channel).generate_summary(llm_pb2.TGISummaryRequest(input_text=DETAILS))
    assert shortened.summary_text


def test_options_of_sampling_take_effect(channel: grpc.Channel) -> None:
    runner = llm_pb2_grpc.LLMRunnerStub(channel)

    def answer(stop: tuple[str, ...] = (), **sampling: float) -> llm_pb2.ModelResponse:
        chosen = llm_pb2.Sampling(**sampling)  # type: ignore[arg-type]
        request = llm_pb2.ModelRequest(formatted_prompt=RECIPE, sampling=chosen, stop=stop, max_tokens=30)
        response: llm_pb2.ModelResponse = runner.call_model(request)
        return response

    greedy = answer().text
    assert answer(temperature=0, top_p=0.9).text == greedy
    drawn = [answer(temperature=1.5, seed=seed).text for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({greedy, *drawn}) > 2
    word = greedy.split()[3]
    stopped = answer(stop=(word,))
    assert (stopped.text, stopped.finish_reason) == (greedy[: greedy.index(word) + len(word)], "stop_sequence")


def test_descriptions(channel: grpc.Channel) -> None:
    request = llm_pb2.LLMMultipleDescriptionGenerationRequest(
        task_title=["Tomato soup", "", "Bird house"],
        ingredients=["tomatoes, onion", "", "wood, nails"],
        domains=["COOKING", "", "DIY"],
    )
    soup, blank, house = llm_pb2_grpc.LLMDescriptionGenerationStub(channel).generate_descriptions(request).description
    assert is_spoken(soup, description.CHARACTERS)
    assert is_spoken(house, description.CHARACTERS)
    assert blank == ""
    assert soup != house


def test_questions(channel: grpc.Channel) -> None:
    request = llm_pb2.ProactiveQuestionGenerationRequest(
        task_title=["Pancakes", "Shelf"],
        previous_steps=["Mix flour and eggs.", "Drill a hole."],
        current_step=["Heat the pan and pour in the batter.", "Put in the plug."],
    )
    stub = llm_pb2_grpc.LLMProactiveQuestionGenerationStub(channel)
    questions = [question.text for question in stub.generate_proactive_question(request).questions]
    assert len(questions) == 2
    for question in questions:
        assert question == "" or (question.endswith("?") and is_spoken(question, proactive_question.CHARACTERS))
    assert any(questions)


@pytest.mark.parametrize("name", ["butter", "milk", "unobtainium"])
def test_replacements(channel: grpc.Channel, name: str) -> None:
    request = llm_pb2.IngredientReplacementRequest(
        task_title="Cake", original_ingredient=llm_pb2.Ingredient(name=name, amount="100 g")
    )
    response = llm_pb2_grpc.LLMReplacementGenerationStub(channel).generate_replacement(request)
    assert response.new_ingredient.name not in ("", name)


def test_rewritten_steps(channel: grpc.Channel) -> None:
    steps = ["Melt the butter in a pan.", "Sift the flour."]
    pair = llm_pb2.ReplacedIngredient(
        original=llm_pb2.Ingredient(name="butter"), replacement=llm_pb2.Ingredient(name="margarine", amount="100 g")
    )
    request = llm_pb2.AdjustedStepGenerationRequest(
        task_title="Cake",
        step=[
            llm_pb2.ExecutionStep(unique_id=str(number), response=llm_pb2.OutputInteraction(speech_text=text))
            for number, text in enumerate(steps)
        ],
        ingredient=[pair],
    )
    response = llm_pb2_grpc.LLMReplacementGenerationStub(channel).rewrite_steps(request)
    changed, unchanged = response.step_text
    assert list(response.ids) == ["0", "1"]
    assert unchanged == steps[1]
    assert changed == "" or (WHOLE_SENTENCES.fullmatch(changed) and "butter" not in changed)


@pytest.mark.parametrize("said", ["I want to make pizza instead", "What is the next step?", '}{ "intent": "none'])
def test_decisions(channel: grpc.Channel, said: str) -> None:
    request = llm_pb2.ExecutionSearchRequest(
        domain=llm_pb2.Session.COOKING, taskmap=llm_pb2.TaskMap(title="Pancakes"), user_question=said
    )
    response = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel).generate_decision(request)
    assert response.intent_classification in execution_search.INTENTS
    assert is_spoken(response.ai_response, execution_search.LONGEST_REPLY)


def test_a_model_that_says_nothing(channel: grpc.Channel) -> None:
    request = llm_pb2.ModelRequest(formatted_prompt="Say nothing.", grammar=llm_pb2.Grammar(regex=" "))
    response, call = llm_pb2_grpc.LLMRunnerStub(channel).call_model.with_call(request)
    assert response.text == ""
    assert dict(call.trailing_metadata())["empty-reason"] == "no_text"
