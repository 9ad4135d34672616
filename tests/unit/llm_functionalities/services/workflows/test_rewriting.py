"""Rewritten steps, and the steps and requirements of a session's task."""

import pytest

from llm_functionalities.services.workflows.rewriting import (
    Replacement,
    SessionRewriting,
    Words,
    parse_step,
    rewriting,
    short_name,
)
from shared.stubs import llm_pb2


def pair(original: str, new: str, amount: str = "") -> llm_pb2.ReplacedIngredient:
    return llm_pb2.ReplacedIngredient(
        original=llm_pb2.Ingredient(name=original), replacement=llm_pb2.Ingredient(name=new, amount=amount)
    )


BUTTER = Replacement(pair("butter", "peanut butter"))
EGGS = Replacement(pair("egg", "banana"))


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("Melt the peanut butter.", "Melt the peanut butter."),
        ("Melt the peanut butter. Then stir in the ban", "Melt the peanut butter."),
        ("Melt the butter.", None),
        ("Melt the peanut butter and the butter.", None),
        ("Beat the eggs.", None),
        ("Beat the EGG.", None),
        ("Peel the eggplant.", "Peel the eggplant."),
        ("", None),
        ("Melt it", None),
    ],
)
def test_a_rewritten_step_is_free_of_what_was_replaced(text: str, step: str | None) -> None:
    assert parse_step(text, [BUTTER, EGGS]) == step


@pytest.mark.parametrize(
    ("text", "name", "mentioned"),
    [
        ("Add the oat milk.", "oat milk", True),
        ("Add the OAT  milk, then stir.", "Oat Milk", True),
        ("Add all-purpose flour.", "all purpose flour", True),
        ("Beat two eggs.", "egg", True),
        ("Slice the tomatoes.", "tomato", True),
        ("Slice the eggplant.", "egg", False),
        ("Fill the boat.", "oat", False),
        ("Use crème fraîche.", "CRÈME FRAÎCHE", True),
        ("Stir.", "", False),
        ("Stir.", "()", False),
        ("", "salt", False),
    ],
)
def test_a_step_mentions_an_ingredient_by_its_words(text: str, name: str, mentioned: bool) -> None:
    assert Words(text).mention(Words(name)) is mentioned


def test_a_name_within_another_is_no_mention_of_its_own() -> None:
    peanut, butter = Words("peanut butter"), Words("butter")
    assert not Words("Melt peanut butter, peanut butter and peanut butters.").mention_beside(butter, peanut)
    assert Words("Melt peanut butter and butter.").mention_beside(butter, peanut)


def test_a_step_that_has_the_new_ingredient_already_needs_no_rewriting() -> None:
    assert rewriting("Toast", "Melt the peanut butter.", [BUTTER]).prompt is None
    assert rewriting("Toast", "Melt the butter.", [BUTTER]).prompt is not None


@pytest.mark.parametrize(
    ("name", "question", "short"),
    [
        ("all-purpose flour", "What can I use instead of flour?", "flour"),
        ("all-purpose flour", "I have no all purpose flour", "all purpose flour"),
        ("whole milk (cold)", "no milk", "milk"),
        ("butter, softened", "no butter at home", "butter"),
        ("cup of milk", "instead of milk", "milk"),
        ("eggs", "I have no egg", ""),
        ("milk", "What about the eggs?", ""),
        ("", "milk", ""),
        ("milk", "", ""),
        ("very " * 100 + "milk", "instead of milk", ""),  # nobody looks that far
    ],
)
def test_the_name_by_which_a_question_calls_an_ingredient(name: str, question: str, short: str) -> None:
    assert short_name(name, question) == short


def session(*steps: llm_pb2.ExecutionStep, question: str = "", **taskmap) -> llm_pb2.Session:
    turns = [
        llm_pb2.ConversationTurn(user_request=llm_pb2.UserRequest(interaction=llm_pb2.InputInteraction(text=text)))
        for text in (question, "yes")
    ]
    task = llm_pb2.Task(phase=llm_pb2.Task.VALIDATING, taskmap=llm_pb2.TaskMap(title="Cake", steps=steps, **taskmap))
    return llm_pb2.Session(turn=turns, task=task)


def step(text: str, *requirements: str, screen: bool = True) -> llm_pb2.ExecutionStep:
    shown = llm_pb2.ScreenInteraction(paragraphs=[text, "Look!"], requirements=requirements) if screen else None
    return llm_pb2.ExecutionStep(response=llm_pb2.OutputInteraction(speech_text=text, screen=shown))


def work(request: llm_pb2.Session, answer: str | None = "Sift the oats.") -> list[int]:
    """Does all parts of a session. Returns those for which the model is asked."""
    rewriting = SessionRewriting(request)
    asked = [part for part in range(rewriting.parts) if rewriting.ask(part).prompt is not None]
    rewriting.put([answer if part in asked else None for part in range(rewriting.parts)])
    return asked


def test_a_session_has_its_ingredient_replaced_wherever_it_is() -> None:
    request = session(
        step("Sift the flour.", "2 cups all-purpose flour", "a sieve"),
        step("Whisk the eggs.", "2 eggs"),
        step("Add the flour.", "a bowl"),
        step("Fold in the flour.", screen=False),
        question="What can I use instead of flour?",
        replaced_ingredients=[pair("all-purpose flour", "Rolled Oats", "3 cups")],
        requirement_list=[
            llm_pb2.Requirement(name="all-purpose flour", amount="2 cups"),
            llm_pb2.Requirement(name="eggs"),
        ],
    )
    assert work(request) == [0, 2, 3]
    taskmap = request.task.taskmap
    responses = [each.response for each in taskmap.steps]
    assert [each.speech_text for each in responses] == ["Sift the oats.", "Whisk the eggs.", *["Sift the oats."] * 2]
    assert list(responses[0].screen.paragraphs) == ["Sift the oats.", "Look!"]
    assert list(responses[1].screen.paragraphs) == ["Whisk the eggs.", "Look!"]
    assert list(responses[0].screen.requirements) == ["3 cups rolled oats", "a sieve"]
    assert list(responses[2].screen.requirements) == ["a bowl", "3 cups rolled oats"]
    assert not responses[3].HasField("screen")
    assert [(each.name, each.amount) for each in taskmap.requirement_list] == [("rolled oats", "3 cups"), ("eggs", "")]


def test_replacing_again_changes_nothing() -> None:
    request = session(
        step("Melt the butter.", "1 cup butter"),
        replaced_ingredients=[pair("butter", "peanut butter")],
        requirement_list=[llm_pb2.Requirement(name="butter", amount="1 cup")],
    )
    assert work(request, "Melt the peanut butter.") == [0]
    once = request.SerializeToString(deterministic=True)
    assert work(request) == []
    assert request.SerializeToString(deterministic=True) == once


def test_a_requirement_of_the_same_name_goes_before_those_that_have_it_in_theirs() -> None:
    request = session(
        replaced_ingredients=[pair("milk", "oat milk")],
        requirement_list=[llm_pb2.Requirement(name="coconut milk"), llm_pb2.Requirement(name="Milk", amount="1 l")],
    )
    work(request)
    names = [(each.name, each.amount) for each in request.task.taskmap.requirement_list]
    assert names == [("coconut milk", ""), ("oat milk", "1 l")]


def test_a_text_that_the_model_cannot_rewrite_stays() -> None:
    request = session(step("Melt the butter.", "butter"), replaced_ingredients=[pair("butter", "oil")])
    assert work(request, answer=None) == [0]
    response = request.task.taskmap.steps[0].response
    assert response.speech_text == response.screen.paragraphs[0] == "Melt the butter."


@pytest.mark.parametrize("phase", ["DOMAIN", "PLANNING", "EXECUTING", "CLOSING"])
def test_only_a_task_that_is_being_validated_changes(phase: str) -> None:
    request = session(step("Melt the butter.", "butter"), replaced_ingredients=[pair("butter", "oil")])
    request.task.phase = llm_pb2.Task.TaskPhase.Value(phase)
    before = llm_pb2.Session.FromString(request.SerializeToString())
    assert work(request) == []
    assert request == before


@pytest.mark.parametrize(
    "request_",
    [
        llm_pb2.Session(),
        llm_pb2.Session(task=llm_pb2.Task(phase=llm_pb2.Task.VALIDATING)),
        session(step("Melt the butter."), replaced_ingredients=[llm_pb2.ReplacedIngredient()]),
        session(step("Melt the butter."), replaced_ingredients=[pair("butter", "")]),
        session(step("Melt the butter."), replaced_ingredients=[pair("", "oil")]),
        session(replaced_ingredients=[pair("butter", "oil")]),
    ],
)
def test_a_session_without_what_it_takes_stays_as_it_is(request_: llm_pb2.Session) -> None:
    before = llm_pb2.Session.FromString(request_.SerializeToString())
    assert work(request_) == []
    assert request_ == before


def test_a_session_of_one_turn_has_no_question() -> None:
    request = session(step("Sift the flour."), replaced_ingredients=[pair("flour", "oats")])
    del request.turn[0]
    assert work(request) == [0]
