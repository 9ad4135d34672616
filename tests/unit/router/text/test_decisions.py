"""Labels, orders and the arithmetic of decisions."""

import json
from itertools import permutations
from math import log
from pathlib import Path

import pytest

from tests.fakes.vocabularies import byte_level
from tgi_server.router.errors import StartupError
from tgi_server.router.text.conversation import Turn
from tgi_server.router.text.decisions import (
    AskedQuestion,
    DecisionConfig,
    Labels,
    choice_confidence,
    labels_of,
    orders_of,
    prompt_of,
    read_decision_config,
    result_of,
    score_of,
    with_question,
)
from tgi_server.router.text.tokenizer import TextTokenizer

CHOICE = AskedQuestion("choice", "What is the tone?", ("calm", "pushy: Pressures the reader"))
PREDICATE = AskedQuestion("predicate", "Is it spam?", ("", ""))


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return byte_level()


def test_prompts_are_those_of_transformers(tokenizer: TextTokenizer) -> None:
    labels = labels_of(CHOICE, (0, 1), "labels", tokenizer)
    assert prompt_of(CHOICE, (0, 1), labels, "labels") == (
        "What is the tone?\nA. calm\nB. pushy: Pressures the reader\n"
        "Answer with the letter of the option that fits best (A to B) only."
    )
    labels = labels_of(PREDICATE, (0, 1), "labels", tokenizer)
    assert prompt_of(PREDICATE, (0, 1), labels, "labels") == "Is it spam?\nAnswer Yes or No only."
    described = AskedQuestion("predicate", "Is it spam?", ("Ads", ""))
    assert prompt_of(described, (0, 1), labels, "labels") == "Is it spam?\nYes: Ads\nAnswer Yes or No only."
    score = AskedQuestion("score", "How urgent?", ("Can wait", "Today"))
    labels = labels_of(score, (0, 1), "labels", tokenizer)
    assert prompt_of(score, (0, 1), labels, "labels") == (
        "How urgent?\nA. Can wait\nB. Today\nAnswer with the letter of the level that fits best (A to B) only."
    )


def test_a_question_is_the_end_of_the_last_message_of_the_user() -> None:
    assert with_question([Turn("user", ("state",))], "Q") == [Turn("user", ("state\n\nQ",))]
    turns = [Turn("user", ("hello",)), Turn("assistant", ("hi",))]
    assert with_question(turns, "Q") == [*turns, Turn("user", ("Q",))]


@pytest.mark.parametrize("count", [2, 26, 27, 62, 63, 255])
def test_labels_are_distinct_and_none_begins_another(count: int, tokenizer: TextTokenizer) -> None:
    question = AskedQuestion("choice", "Which?", tuple(map(str, range(count))))
    labels = labels_of(question, range(count), "labels", tokenizer)
    assert len(set(labels.tokens)) == len(set(labels.texts)) == count
    assert not any(one != other == one[: len(other)] for one in labels.tokens for other in labels.tokens)
    single = all(len(each) == 1 for each in labels.tokens)
    assert single == (count <= 62)  # this tokenizer has letters and digits, and no pairs of them
    if count == 26:
        assert labels.texts == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def test_labels_of_several_tokens_are_scored_step_by_step() -> None:
    labels = Labels(("ab", "ac", "d"), ((1, 2), (1, 3), (4,)))
    assert labels.steps == {(): (1, 4), (1,): (2, 3)}
    steps = {(): {1: log(0.5), 4: log(0.25)}, (1,): {2: log(0.1), 3: log(0.4)}}
    assert labels.logprobs(steps) == pytest.approx([log(0.05), log(0.2), log(0.25)])


def test_probabilities_are_a_softmax_and_the_mass_is_their_sum() -> None:
    labels = Labels(("A", "B"), ((1,), (2,)))
    result = result_of([(0, 1)], [labels], [[log(0.3), log(0.1)]], None, "labels")
    assert result.probabilities == pytest.approx([0.75, 0.25])
    assert result.label_mass == pytest.approx(0.4)


def test_the_length_of_a_text_does_not_count() -> None:
    labels = Labels(("a", "bcd"), ((1,), (2, 3, 4)))
    result = result_of([(0, 1)], [labels], [[log(0.2), 3 * log(0.2)]], None, "sequences")
    assert result.probabilities == pytest.approx([0.5, 0.5])


def test_a_bias_for_the_first_option_cancels_out_over_all_orders() -> None:
    options = ("x", "y", "z")
    results = []
    for listed in permutations(options):
        question = AskedQuestion("choice", "Which?", listed)
        orders = orders_of(question, "orders")
        labels = Labels(("A", "B", "C"), ((1,), (2,), (3,)))
        biased = [[log(0.7), log(0.2), log(0.1)]] * len(orders)
        result = result_of(orders, [labels] * len(orders), biased, None, "labels")
        results.append(dict(zip(listed, result.probabilities, strict=True)))
    assert results[0] == pytest.approx(dict.fromkeys(options, 1 / 3))
    assert all(result == results[0] for result in results)


def test_calibration_divides_by_what_a_neutral_input_gives() -> None:
    labels = Labels(("A", "B"), ((1,), (2,)))
    result = result_of([(0, 1)], [labels], [[log(0.6), log(0.2)]], [log(0.9), log(0.1)], "labels")
    assert result.probabilities == pytest.approx([0.75 / 0.9 / (0.75 / 0.9 + 0.25 / 0.1), 0.75])


def test_a_model_may_have_labels_and_temperatures_of_its_own(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    content = {"labels": {"choice": ["x", "y", "z"], "noul": ["T", "F"]}, "temperature": {"choice": 2.0}}
    (tmp_path / "decision.json").write_text(json.dumps(content))
    config = read_decision_config(tmp_path)
    assert labels_of(CHOICE, (0, 1), "labels", tokenizer, config.labels["choice"]).texts == ("x", "y")
    assert labels_of(PREDICATE, (1, 0), "labels", tokenizer, config.labels["predicate"]).texts == ("F", "T")
    labels = Labels(("x", "y"), ((1,), (2,)))
    result = result_of([(0, 1)], [labels], [[log(0.8), log(0.2)]], None, "labels", config.temperature["choice"])
    assert result.probabilities == pytest.approx([2 / 3, 1 / 3])
    assert read_decision_config(tmp_path / "nowhere") == DecisionConfig()
    for wrong in ({"temperature": {"choice": 0}}, {"labels": {"guess": ["a"]}}, {"labels": [1]}):
        (tmp_path / "decision.json").write_text(json.dumps(wrong))
        with pytest.raises(StartupError, match="cannot be used"):
            read_decision_config(tmp_path)


def test_confidence_is_0_for_chance_and_1_for_certainty() -> None:
    assert choice_confidence([0.25] * 4) == 0
    assert choice_confidence([1.0, 0.0]) == 1
    assert score_of([0.0, 0.0, 1.0]) == (2, 1)
    assert score_of([1 / 3] * 3) == pytest.approx((1, 0), abs=1e-9)


def test_at_most_eight_orders_are_asked() -> None:
    question = AskedQuestion("choice", "Which?", tuple(map(str, range(100))))
    orders = orders_of(question, "orders")
    assert len(set(orders)) == 8
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders_of(question, "none") == [tuple(range(100))]
    assert orders_of(AskedQuestion("score", "How?", ("a", "b", "c")), "orders") == [(0, 1, 2), (2, 1, 0)]
