"""Jump-forward tokens are appended without a forward pass of their own, and nothing else changes."""

import json

import pytest

from tests.unit.grammar.driver import Driver, Output
from tgi_server.contract import FinishReason, Grammar, GrammarKind, ReportParameters, SamplingParameters
from tgi_server.engine import Engine

PROMPT = [1, 40, 41, 42, 43]
SCHEMA = {
    "type": "object",
    "properties": {
        "first name": {"type": "string", "maxLength": 8},
        "date of birth": {"type": "string", "format": "date"},
        "favourite animal": {"enum": ["dog", "quick brown fox"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 4},
    },
    "required": ["first name", "date of birth", "favourite animal", "legs"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
SEEDS = range(6)
SAMPLINGS = [
    SamplingParameters(),
    SamplingParameters(do_sample=True, seed=3, temperature=1.5),
    SamplingParameters(do_sample=True, seed=4, top_k=5, top_p=0.9, typical_p=0.95, min_p=0.01),
    SamplingParameters(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParameters(do_sample=True, seed=5, watermark=True, logit_bias={40: 5.0, 60: -100.0}),
]


def jump_forward(output: Output) -> int:
    """Returns the number of jump-forward tokens in an output."""
    return sum(len(generation.jump_forward) for generation in output.generations)


def texts(driver: Driver, outputs: list[Output]) -> list[str]:
    return [driver.text(output) for output in outputs]


def test_json_takes_fewer_steps_than_it_has_tokens(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    for output in driver.run(*(driver.sequence(PROMPT, JSON, 200, seed=seed) for seed in SEEDS)):
        assert output.finish_reason is FinishReason.EOS_TOKEN
        assert set(json.loads(driver.text(output))) == set(SCHEMA["properties"])
        assert len(output.generations) == len(output.tokens) - jump_forward(output)
        assert jump_forward(output) > len(output.tokens) // 2


def test_forced_tokens_are_those_of_the_tokenizer(random_engine: Engine) -> None:
    """The tokens are those that the model was shown of such a text in its training."""
    driver = Driver(random_engine)
    grammar = Grammar(GrammarKind.REGEX, "the quick brown fox (jumps|sleeps) over the lazy dog")
    (output,) = driver.run(driver.sequence(PROMPT, grammar))
    head = driver.tokenizer.encode("the quick brown fox ")
    assert output.tokens[: len(head) - 1] == head[:-1]
    tail = driver.tokenizer.encode(" over the lazy dog")
    assert output.tokens[-1 - len(tail) : -1] == tail


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_the_tokens_do_not_depend_on_the_blocks(random_engine: Engine, sampling: SamplingParameters) -> None:
    """Fewer tokens are appended at once when a sequence gets one block at a time; they are the same ones."""
    plenty = Driver(random_engine)
    expected = plenty.run(plenty.sequence(PROMPT, JSON, 200, sampling=sampling))[0]
    scarce = Driver(random_engine, scarce=True)
    output = scarce.run(scarce.sequence(PROMPT, JSON, 200, sampling=sampling))[0]
    assert output.tokens == expected.tokens
    assert jump_forward(output) < jump_forward(expected)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_a_preempted_sequence_goes_on_where_it_was(
    random_engine: Engine, sampling: SamplingParameters, steps: int
) -> None:
    driver = Driver(random_engine)
    expected = driver.run(driver.sequence(PROMPT, JSON, 200, sampling=sampling))[0]
    driver = Driver(random_engine)
    sequence = driver.sequence(PROMPT, JSON, 200, sampling=sampling)
    driver.join(sequence)
    for _ in range(steps):
        driver.step()
    before = driver.outputs[0].tokens
    driver.leave(0)
    (after,) = driver.run(driver.sequence(PROMPT, JSON, 200, sampling=sampling, generated_ids=before))
    assert before + after.tokens == expected.tokens


def test_other_sequences_of_the_batch_change_nothing(random_engine: Engine) -> None:
    alone = []
    for seed in SEEDS:
        driver = Driver(random_engine)
        alone.append(driver.run(driver.sequence(PROMPT, JSON if seed % 2 else None, 60, seed=seed))[0].tokens)
    driver = Driver(random_engine)
    together = driver.run(*(driver.sequence(PROMPT, JSON if seed % 2 else None, 60, seed=seed) for seed in SEEDS))
    assert [output.tokens for output in together] == alone


@pytest.mark.parametrize("new", [1, 2, 3, 7, 20])
def test_the_length_is_exact(random_engine: Engine, new: int) -> None:
    driver = Driver(random_engine)
    (output,) = driver.run(driver.sequence(PROMPT, JSON, new))
    assert len(output.tokens) == new
    assert output.finish_reason is FinishReason.LENGTH


def test_the_end_of_the_text_may_be_the_last_token_that_is_allowed(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    length = len(driver.tokenizer.encode("the quick brown fox")) + 1
    whole, cut = driver.run(
        *(
            driver.sequence(PROMPT, Grammar(GrammarKind.REGEX, "the quick brown fox"), new)
            for new in (length, length - 1)
        )
    )
    assert whole.finish_reason is FinishReason.EOS_TOKEN
    assert cut.finish_reason is FinishReason.LENGTH
    assert texts(driver, [whole, cut]) == ["the quick brown fox"] * 2


def test_ignored_ends_of_sequence(random_engine: Engine) -> None:
    """The text continues as long as the grammar allows more, and ends when it allows only the end."""
    driver = Driver(random_engine)
    endless, bounded = driver.run(
        driver.sequence(PROMPT, Grammar(GrammarKind.REGEX, "[ab]+"), 60, ignore_eos=True),
        driver.sequence(PROMPT, Grammar(GrammarKind.REGEX, "[ab]{1,5}"), 60, ignore_eos=True),
    )
    assert endless.finish_reason is FinishReason.LENGTH
    assert len(driver.visible(endless)) == 60
    assert bounded.finish_reason is FinishReason.EOS_TOKEN
    assert len(driver.text(bounded)) == 5


def test_prompt_logprobs_are_reported_once(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    report = ReportParameters(logprobs=True, top_n_tokens=2, prefill_logprobs=True)
    driver.join(driver.sequence(PROMPT, JSON, 40, report=report))
    while random_engine.batch:
        driver.step()
    assert driver.outputs[0].finish_reason is not None


@pytest.mark.slow
def test_a_grammar_that_fails_ends_its_request_and_no_other(random_engine: Engine) -> None:
    """The longer the text, the more ways there are to read it: that is not seen when the grammar is compiled."""
    driver = Driver(random_engine)
    grammar = Grammar(GrammarKind.LARK, 'start: text\ntext: text text text | text text | "" | /[a-z]/')
    failed, plain = driver.run(
        driver.sequence(PROMPT, grammar, 400, ignore_eos=True), driver.sequence(PROMPT, JSON, 200)
    )
    assert failed.error is not None
    assert "items" in failed.error
    assert "\n" not in failed.error
    assert plain.finish_reason is FinishReason.EOS_TOKEN


def test_a_grammar_that_has_not_been_compiled_ends_its_request_and_no_other(random_engine: Engine) -> None:
    """Compiling the grammar in a step would hold up every sequence."""
    driver = Driver(random_engine)
    missing = driver.sequence(PROMPT, None, 20)
    missing.grammar = Grammar(GrammarKind.REGEX, "never seen before")
    failed, plain = driver.run(missing, driver.sequence(PROMPT, JSON, 200))
    assert failed.error is not None
    assert "not been compiled" in failed.error
    assert plain.finish_reason is FinishReason.EOS_TOKEN
