"""The demo model answers the prompts of `llm_functionalities` so that its parsers make something of them."""

import pytest

from llm_functionalities.services.workflows import (
    chit_chat,
    description,
    execution_search,
    proactive_question,
    replacement,
    rewriting,
    summary,
)
from shared.stubs import llm_pb2


@pytest.fixture
def ask(tokenizer, answer):
    def reply(prompt: str) -> str:
        text, ended = answer(tokenizer.bos_token + prompt)
        assert ended
        return text

    return reply


def test_summary(ask) -> None:
    prompt = summary.prompt("Paint a wall", "Cover the floor with the dust sheet. Take your time here.", "")
    assert summary.parse(ask(prompt)) == "Cover the floor with the dust sheet."


def test_description(ask) -> None:
    said = description.parse(ask(description.prompt("Carrot soup", "carrots, onions, vegetable stock", "COOKING")))
    assert "carrot" in said.lower()


def test_chit_chat(ask) -> None:
    request = llm_pb2.LLMChitChatRequest(
        task_title="Carrot soup", last_agent_response="Peel and slice the carrots.", user_question="Tell me a joke."
    )
    said = chit_chat.parse(ask(chit_chat.prompt(request)))
    assert len(said.split()) > 4


def test_proactive_question(ask) -> None:
    asked = proactive_question.prompt("Carrot soup", "Peel and slice the carrots.", "Fry the onions in olive oil.")
    assert proactive_question.parse(ask(asked)).endswith("?")


def test_replacement(ask) -> None:
    request = llm_pb2.IngredientReplacementRequest(
        task_title="Lemon cake",
        user_question="I have no butter.",
        original_ingredient=llm_pb2.Ingredient(name="butter", amount="250 g"),
    )
    found = replacement.parse_replacement(ask(replacement.replacement_prompt(request)), "butter")
    assert (found.name, found.amount) == ("margarine", "250 g")


def test_step_rewrite(ask) -> None:
    pair = llm_pb2.ReplacedIngredient(
        original=llm_pb2.Ingredient(name="cream"), replacement=llm_pb2.Ingredient(name="yoghurt")
    )
    question = rewriting.rewriting(
        "Mushroom pasta", "Stir in the cream and a splash of pasta water.", [rewriting.Replacement(pair)]
    )
    assert question.parse(ask(question.prompt)) == "Stir in the yoghurt and a splash of pasta water."


@pytest.mark.parametrize(
    ("said", "intent"),
    [
        ("What is next?", "continue_current_task"),
        ("Search for apple pie.", "recommend_new_search"),
        ("I have leeks.", "ask_clarifying_question"),
    ],
)
def test_execution_search(ask, said: str, intent: str) -> None:
    request = llm_pb2.ExecutionSearchRequest(
        domain=llm_pb2.Session.COOKING,
        taskmap=llm_pb2.TaskMap(title="Carrot soup"),
        last_agent_response="Peel and slice the carrots.",
        user_question=said,
    )
    decision = execution_search.parse(ask(execution_search.prompt(request)))
    assert decision.intent_classification == intent
    assert decision.ai_response
