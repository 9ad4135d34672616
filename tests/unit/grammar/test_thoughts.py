"""Thoughts end when their budget is used up: in the model's own form, whatever else is computed beside them."""

import json
from collections.abc import Sequence

import pytest

from tests.unit.grammar.driver import Driver
from tgi_server.contract import FinishReason, Grammar, GrammarKind, ReportParameters, SamplingParameters, ThoughtBudget
from tgi_server.engine import Engine, RunningSequence
from tgi_server.grammar import LimitedThoughts

PROMPT = [1, 40, 41, 42, 43]
BEGIN, END = "<think>", "</think>"
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 4}},
    "required": ["legs"],
    "additionalProperties": False,
}
# Reasoning, and then JSON, as the router frames an answer.
FRAMED = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"$defs": {"answer": SCHEMA}, "anyOf": [{"$ref": "#/$defs/answer"}]}),
    frame=f'%llguidance {{}}\nthought[lazy]: /(.|\\n)*/ "{END}"\nstart: thought %schema "#/$defs/answer"\n',
)
SAMPLINGS = [SamplingParameters(), SamplingParameters(do_sample=True, seed=3, temperature=1.5, top_p=0.9)]


def budget(driver: Driver, tokens: int, *, open_: bool = True, repeats: bool = False) -> ThoughtBudget:
    return ThoughtBudget(tokens, BEGIN, END, tuple(driver.tokenizer.encode(END)), open_, repeats)


def follow(driver: Driver, limit: ThoughtBudget, text: str, *, generated: Sequence[int] = ()) -> LimitedThoughts:
    """Returns what has followed a text, byte by byte, whatever it would have forced."""
    thoughts = LimitedThoughts(limit, driver.tokenizer.spelling, None, (), generated, ignore_eos=False)
    for letter in text:
        for token in driver.tokenizer.encode(letter):
            thoughts.advance(token, 0)
    return thoughts


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_thought_has_no_more_tokens_than_its_budget(
    random_engine: Engine, tokens: int, sampling: SamplingParameters
) -> None:
    driver = Driver(random_engine)
    plain = driver.sequence(PROMPT, None, 80, sampling=sampling, ignore_eos=True)
    limited = driver.sequence(
        PROMPT, None, 80, sampling=sampling, ignore_eos=True, thought_budget=budget(driver, tokens)
    )
    other, output = driver.run(plain, limited)
    closing = driver.tokenizer.encode(END)
    assert output.tokens[:tokens] == other.tokens[:tokens]
    assert output.tokens[tokens : tokens + len(closing)] == closing
    assert len(output.tokens) == 80
    assert output.finish_reason is FinishReason.LENGTH


def test_the_text_behind_the_thought_is_the_models_own(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    greedy = {"sampling": SamplingParameters(), "ignore_eos": True}
    (output,) = driver.run(driver.sequence(PROMPT, None, 40, thought_budget=budget(driver, 7), **greedy))
    closed = 7 + len(driver.tokenizer.encode(END))
    (behind,) = driver.run(driver.sequence(PROMPT + output.tokens[:closed], None, 40 - closed, **greedy))
    assert output.tokens[closed:] == behind.tokens


def test_what_the_model_ends_itself_is_not_closed_again(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    assert follow(driver, budget(driver, 20), f"Hm. {END}A long answer, longer than that.").done
    assert not follow(driver, budget(driver, 5), "Hm, w").free
    partly = follow(driver, budget(driver, 5), "Hm." + END[:2])
    assert partly.jump_forward == driver.tokenizer.encode(END[2:])[0]


def test_an_answer_without_thoughts_has_no_budget(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    unopened = budget(driver, 3, open_=False)
    assert not follow(driver, unopened, " \n<thin").done
    assert follow(driver, unopened, "<thin air").done
    assert follow(driver, unopened, f"\n{BEGIN}abc").jump_forward is not None
    assert follow(driver, unopened, f"\n{BEGIN}ab").free
    assert not follow(driver, budget(driver, 0, open_=False), BEGIN).free


def test_thoughts_that_follow_each_other_have_one_budget(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    limit = budget(driver, 27, repeats=True)
    spent = follow(driver, limit, f"0123456789{END}")  # the bytes of the end have counted until it was one
    assert spent.free
    assert not spent.done
    again = follow(driver, limit, f"0123456789{END}{BEGIN}0123456789")
    assert again.jump_forward is not None
    assert follow(driver, limit, f"0123456789{END}The answer").done


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("tokens", [0, 6])
def test_a_grammar_goes_on_behind_the_thought(random_engine: Engine, sampling: SamplingParameters, tokens: int) -> None:
    driver = Driver(random_engine)
    limited = driver.sequence(PROMPT, FRAMED, 100, sampling=sampling, thought_budget=budget(driver, tokens))
    (output,) = driver.run(limited)
    assert output.error is None
    thought, _, answer = driver.text(output).partition(END)
    assert 0 <= json.loads(answer)["legs"] <= 4
    # In the middle of a character, the grammar wants the rest of it first.
    assert len(driver.tokenizer.lookup.tokenize_bytes(thought.encode())) <= tokens + 3


@pytest.mark.parametrize("grammar", [None, FRAMED], ids=["text", "grammar"])
@pytest.mark.parametrize("steps", [1, 4, 7, 9])
def test_a_preempted_thought_has_the_rest_of_its_budget(
    random_engine: Engine, grammar: Grammar | None, steps: int
) -> None:
    def sequence(driver: Driver, generated: Sequence[int] = ()) -> RunningSequence:
        limit = budget(driver, 6)
        return driver.sequence(PROMPT, grammar, 40, thought_budget=limit, generated_ids=list(generated))

    driver = Driver(random_engine)
    (expected,) = driver.run(sequence(driver))
    driver = Driver(random_engine)
    driver.join(sequence(driver))
    for _ in range(steps):
        driver.step()
    before = driver.outputs[0].tokens
    driver.leave(0)
    (after,) = driver.run(sequence(driver, before))
    assert before + after.tokens == expected.tokens


def test_drafts_change_nothing(random_engine: Engine, drafting_engine: Engine) -> None:
    outputs, accepted = [], 0
    for engine in (random_engine, drafting_engine):
        driver = Driver(engine)
        sequences = [
            driver.sequence(
                PROMPT * 4,
                grammar,
                60,
                sampling=sampling,
                thought_budget=budget(driver, tokens),
                report=ReportParameters(logprobs=True),
            )
            for tokens in (0, 3, 20)
            for grammar in (None, FRAMED)
            for sampling in SAMPLINGS
        ]
        outputs.append([output.tokens for output in driver.run(*sequences)])
        accepted = driver.accepted
    assert outputs[0] == outputs[1]
    assert accepted
