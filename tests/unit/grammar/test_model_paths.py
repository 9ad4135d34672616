"""Grammars work on every way to run a model: paged, padded, encoder-decoder."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make, make_tokenizer
from tests.unit.grammar.conftest import load
from tests.unit.grammar.driver import Driver
from tgi_server.contract import FinishReason, Grammar, GrammarKind, ReportParameters, SamplingParameters

PROMPT = [5, 40, 41, 42]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["brown fox", "lazy dog"]},
        "legs": {"type": "integer", "maximum": 9, "x-hint": "all"},
    },
    "required": ["name", "legs"],
}


@pytest.mark.parametrize(
    "architecture",
    ["mistral", "mamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "bloom", "gpt2", "bart"))],
)
def test_structured_generation(architecture: str, tmp_path: Path) -> None:
    folder = make(architecture, tmp_path, vocab_size=TOKENIZER_VOCAB_SIZE)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    driver = Driver(load(folder))
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    sequences = [driver.sequence(PROMPT, grammar if seed % 2 else None, 90, seed=seed) for seed in range(6)]
    for output in driver.run(*sequences)[1::2]:
        assert output.error is None
        assert output.finish_reason is FinishReason.EOS_TOKEN or len(output.tokens) == 90
        assert driver.visible(output)
        if output.finish_reason is FinishReason.EOS_TOKEN:
            assert json.loads(driver.text(output))["name"] in SCHEMA["properties"]["name"]["enum"]
    assert any(driver.outputs[i].finish_reason is FinishReason.EOS_TOKEN for i in (1, 3, 5))


def test_greedy_tokens_are_the_same_whether_all_logits_are_computed_or_only_the_likeliest_found(tmp_path: Path) -> None:
    """The vocabulary, mostly unused, is so large that a CPU with the instructions does the latter, unless a request
    wants log-probabilities.
    """
    folder = make("llama", tmp_path, vocab_size=70_000)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    engine = load(folder, torch.bfloat16)
    grammars = [
        *(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), None),
        *(Grammar(GrammarKind.REGEX, "([a-z]+ )+[A-Z]{50}"), Grammar(GrammarKind.REGEX, "[^é]+"), None),
    ]
    texts = []
    for logprobs in (True, False):
        driver = Driver(engine)
        report = ReportParameters(logprobs=logprobs)
        first, *others = [
            driver.sequence(
                [*PROMPT, 50 + i], grammar, 60, sampling=SamplingParameters(), report=report, ignore_eos=True
            )
            for i, grammar in enumerate(grammars)
        ]
        driver.join(first)
        driver.step()
        driver.run(*others)
        texts.append([(output.tokens, output.error) for output in driver.outputs.values()])
        assert len({tuple(tokens) for tokens, _ in texts[-1]}) == len(grammars)
    assert texts[0] == texts[1]
