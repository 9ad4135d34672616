"""The tokens of a reply, and all that is reported of them, are the same with drafts and without."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_models import make_llama
from tgi_server import demo_model
from tgi_server.contract import (
    Grammar,
    GrammarKind,
    ReportParameters,
    SamplingParameters,
    StoppingParameters,
)
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import Driver, Output
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.drafters import Drafter, HistoryDrafter, NgramDrafter

NEW = 40
PROMPTS = [[1, 40, 77, 300], [1, *range(50, 90), *range(50, 60)], [1, 5, 6, 5, 6, 5], [1, *range(400, 480)]]
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "kind": {"enum": ["a red brick", "a green bottle"]},
                "count": {"type": "integer"},
            },
            "required": ["name", "kind", "count"],
        }
    ),
)
# What a request may want; each is asked of all prompts.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with reports": {"report": ReportParameters(logprobs=True, top_n_tokens=2, prefill_logprobs=True)},
    "sampled": {"sampling": SamplingParameters(do_sample=True, temperature=1.2, top_k=20, seed=3)},
    "sampled with reports": {
        "sampling": SamplingParameters(do_sample=True, top_p=0.8, seed=4),
        "report": ReportParameters(logprobs=True, top_n_tokens=3),
    },
    "penalties": {
        "sampling": SamplingParameters(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5),
        "report": ReportParameters(logprobs=True),
    },
    "sampled penalties": {
        "sampling": SamplingParameters(do_sample=True, repetition_penalty=1.2, presence_penalty=0.3, seed=9)
    },
    "watermark": {"sampling": SamplingParameters(do_sample=True, watermark=True, seed=5)},
    "greedy watermark": {"sampling": SamplingParameters(watermark=True)},
    "bias": {"sampling": SamplingParameters(logit_bias={77: 3.0, 5: -2.0})},
    "grammar": {"grammar": SCHEMA},
    "sampled grammar": {"grammar": SCHEMA, "sampling": SamplingParameters(do_sample=True, temperature=2.0, seed=6)},
    "grammar with reports": {"grammar": SCHEMA, "report": ReportParameters(logprobs=True, top_n_tokens=2)},
    "endless grammar": {"grammar": Grammar(GrammarKind.REGEX, "([a-d] )+"), "ignore_eos": True},
}


class Guesses(Drafter):
    """Knows the replies, and guesses them wrong now and then: at each place in the same way."""

    def __init__(self, replies: dict[int, list[int]], vocab_size: int) -> None:
        self._replies = replies
        self._vocab_size = vocab_size

    def propose(self, sequences: Sequence[RunningSequence], most: Sequence[int]) -> list[list[int]]:
        return [
            [self._guess(each, place) for place in range(each.generated, each.generated + tokens)]
            for each, tokens in zip(sequences, most, strict=True)
        ]

    def _guess(self, sequence: RunningSequence, place: int) -> int:
        reply = self._replies[sequence.request_id]
        wrong = random.Random(f"{sequence.request_id}/{place}").random() < 0.3 or place >= len(reply)
        return place % self._vocab_size if wrong else reply[place]


def _load(speculative_model: Path | None = None) -> Engine:
    config = EngineConfig(demo_model.PATH, dtype=torch.float32, speculate=5, speculative_model=speculative_model)
    engine = Engine(config)
    engine.warm_up(max_batch_size=len(REQUESTS) * len(PROMPTS), max_prefill_tokens=4096, max_total_tokens=256)
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return _load()


def _sequences(replies: dict[int, list[int]] | None = None) -> list[RunningSequence]:
    """replies: what has been written for the same prompts before, by request id."""
    return [
        RunningSequence(
            index,
            prompt,
            StoppingParameters(NEW, options.get("ignore_eos", False)),
            earlier_reply=(replies or {}).get(index, []),
            **{name: option for name, option in options.items() if name != "ignore_eos"},
        )
        for index, (prompt, options) in enumerate((prompt, each) for each in REQUESTS.values() for prompt in PROMPTS)
    ]


def _tokens(driver: Driver) -> dict[int, tuple[list[int], Any]]:
    return {index: (output.tokens, output.finish_reason) for index, output in driver.outputs.items()}


def _run(
    engine: Engine, drafters: Sequence[Drafter], *, replies: Any = None, grow: bool = False, every: int = 1
) -> Driver:
    assert engine.speculation is not None
    engine.speculation.drafters = drafters
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    driver = Driver(engine, grow=grow)
    waiting = _sequences(replies)[every - 1 :: every]
    while waiting or driver.busy:
        for sequence in waiting[:9]:  # they come little by little
            driver.add(sequence)
        del waiting[:9]
        driver.step()
    return driver


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Driver:
    driver = _run(engine, [])
    assert driver.drafted == 0
    return driver


DRAFTERS: dict[str, Callable[[dict[int, list[int]]], Drafter]] = {
    "n-gram": lambda replies: NgramDrafter(),
    "history": lambda replies: HistoryDrafter(),
    "guesses": lambda replies: Guesses(replies, 512),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("grow", [False, True])
def test_replies_are_the_same_with_drafts_and_without(engine: Engine, plain: Driver, name: str, grow: bool) -> None:
    replies = {index: output.tokens for index, output in plain.outputs.items()}
    driver = _run(engine, [DRAFTERS[name](replies)], replies=replies, grow=grow)
    _compare(driver, plain)
    assert 0 < driver.accepted <= driver.drafted
    if name == "guesses":
        assert driver.accepted < driver.drafted


def _compare(driver: Driver, plain: Driver) -> None:
    assert _tokens(driver) == {index: each for index, each in _tokens(plain).items() if index in driver.outputs}
    for index, output in driver.outputs.items():
        tops, logprobs = _reports(output)
        expected_tops, expected_logprobs = _reports(plain.outputs[index])
        assert tops == expected_tops
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def _untrained(folder: Path) -> Path:
    """Makes a model of random weights with the demo model's tokenizer."""
    make_llama(folder, vocab_size=3072, num_hidden_layers=1)
    shutil.copyfile(demo_model.PATH / "tokenizer.json", folder / "tokenizer.json")
    return folder


def _medusa(folder: Path) -> Path:
    """Makes five heads: one that is the model's own, and others whose blocks are random."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 5, "medusa_num_layers": 1}))
    weights = {}
    for head in range(5):
        weights[f"{head}.0.linear.weight"] = torch.randn(256, 256) * 0.02 * head
        weights[f"{head}.0.linear.bias"] = torch.zeros(256)
    save_file(weights, folder / "medusa_lm_head.safetensors")
    return folder


def _eagle(folder: Path) -> Path:
    """Makes a network of random weights with the head of the model."""
    folder.mkdir()
    config = json.loads((demo_model.PATH / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))
    shapes = {"q": (256, 512), "k": (128, 512), "v": (128, 512), "o": (256, 256)}
    weights = {f"midlayer.self_attn.{name}_proj.weight": torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"midlayer.mlp.{name}_proj.weight": torch.randn(640, 256) for name in ("gate", "up")}
    weights |= {"midlayer.mlp.down_proj.weight": torch.randn(256, 640), "fc.weight": torch.randn(256, 768)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights |= {f"midlayer.{name}.weight": torch.ones(256) for name in norms}
    save_file(
        {name: 0.05 * weight for name, weight in weights.items()} | {"norm.weight": torch.ones(256)},
        folder / "model.safetensors",
    )
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "itself": lambda _: demo_model.PATH,
    "untrained": _untrained,
    "medusa": _medusa,
    "eagle": _eagle,
}


@pytest.mark.parametrize(
    ("name", "every"),
    [("itself", 4), ("eagle", 4), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in MODELS)],
)
@pytest.mark.parametrize("grow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_replies_are_the_same_with_a_model_that_drafts(
    plain: Driver, name: str, every: int, grow: bool, tmp_path: Path
) -> None:
    """every: 4: of each kind of request one."""
    engine = _load(MODELS[name](tmp_path / name))
    assert engine.speculation is not None
    driver = _run(engine, engine.speculation.drafters[-1:], grow=grow, every=every)
    _compare(driver, plain)
    assert 0 < driver.drafted > driver.accepted


def _reports(output: Output) -> tuple[list[list[int]], list[float]]:
    """Returns prompts and likely tokens, and log-probabilities, as they were reported; none of forced tokens."""
    tops, logprobs = [], []
    for generation in output.generations:
        if generation.prompt_tokens is not None:
            tops.append(generation.prompt_tokens.ids)
        if generation.top_tokens is not None and len(generation.top_tokens.ids) > 1:
            tops.append(generation.top_tokens.ids)
            logprobs += generation.top_tokens.logprobs
        if generation.logprob is not None and generation.logprob < 0.0:
            logprobs.append(generation.logprob)
    return tops, logprobs
