"""The tokens of a reply, and all that is reported of them, are the same with drafts and without."""

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_models import make_llama
from tests.unit.engine.ranks import Ranks
from tests.unit.engine.request_kinds import KINDS, compare, of_every_kind, run_overlapping
from tests.unit.engine.requests import load_engine
from tgi_server import demo_model
from tgi_server.contract import BlockCopy, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver, Output
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.drafters import Drafter, HistoryDrafter, NgramDrafter

Outputs = dict[int, Output]

LENGTHS, NEXT = (40, 12, 40, 24), 12
PROMPTS = [[1, 40, 77, 300], [1, *range(50, 90), *range(50, 60)], [1, 5, 6, 5, 6, 5], [1, *range(400, 480)]]


class Guesses(Drafter):
    """Knows the replies, and guesses them wrong now and then: at each place in the same way."""

    def __init__(self, replies: Mapping[int, list[int]], vocab_size: int) -> None:
        self._replies = replies
        self._vocab_size = vocab_size

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        return {
            each: [self._guess(each, place) for place in range(each.generated, each.generated + tokens)]
            for each, tokens in room.items()
        }

    def _guess(self, sequence: RunningSequence, place: int) -> int:
        reply = self._replies[sequence.request_id]
        wrong = random.Random(f"{sequence.request_id}/{place}").random() < 0.3 or place >= len(reply)
        return place % self._vocab_size if wrong else reply[place]


def _load(speculative_model: Path | None = None, group: ShardGroup | None = None) -> Engine:
    engine = load_engine(demo_model.PATH, speculate=5, speculative_model=speculative_model, group=group)
    engine.warm_up(max_batch_size=len(KINDS) * len(PROMPTS), max_prefill_tokens=4096, max_total_tokens=256)
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return _load()


def _run(
    engine: Engine,
    drafters: Sequence[Drafter],
    *,
    replies: Mapping[int, list[int]] | None = None,
    grow: bool = False,
    every: int = 1,
) -> tuple[Outputs, Driver]:
    """replies: what has been written for the same prompts before, by request id. every: one request of so many.

    grow: sequences get their blocks little by little, and some are preempted.
    """
    assert engine.speculation is not None
    engine.speculation.drafters = drafters
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    driver = Driver(engine, grow=grow)
    sequences = of_every_kind(PROMPTS, LENGTHS)[every - 1 :: every]
    for sequence in sequences:
        sequence.earlier_reply = (replies or {}).get(sequence.request_id, [])
    return run_overlapping(driver, sequences, preempted=3 if grow else 0), driver


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Outputs:
    outputs, driver = _run(engine, [])
    assert driver.drafted == 0
    return outputs


DRAFTERS: dict[str, Callable[[Mapping[int, list[int]]], Drafter]] = {
    "n-gram": lambda replies: NgramDrafter(),
    "history": lambda replies: HistoryDrafter(),
    "guesses": lambda replies: Guesses(replies, 512),
}


@pytest.mark.parametrize("kernels", [True, False])
def test_tokens_of_greedy_requests_by_themselves_are_chosen_at_once(
    engine: Engine, plain: Outputs, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(engine._backend, "samples_on_cpu", False)
    monkeypatch.setattr(engine, "_choose", lambda *_: pytest.fail("tokens are chosen one by one"))
    assert engine.speculation is not None
    engine.speculation.drafters = [Guesses(_replies(plain), 512)]
    driver = Driver(engine)
    greedy = of_every_kind(PROMPTS, LENGTHS)[: 2 * len(PROMPTS)]
    assert [each.report.logprobs for each in greedy] == [False] * len(PROMPTS) + [True] * len(PROMPTS)
    compare(run_overlapping(driver, greedy), plain)
    assert 0 < driver.accepted < driver.drafted


def _replies(plain: Outputs) -> dict[int, list[int]]:
    return {index: output.tokens for index, output in plain.items()}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("grow", [pytest.param(False, marks=pytest.mark.slow), True])
def test_replies_are_the_same_with_drafts_and_without(engine: Engine, plain: Outputs, name: str, grow: bool) -> None:
    replies = _replies(plain)
    outputs, driver = _run(engine, [DRAFTERS[name](replies)], replies=replies, grow=grow)
    compare(outputs, plain)
    assert 0 < driver.accepted <= driver.drafted
    if name == "guesses":
        assert driver.accepted < driver.drafted


def _follow_up(plain: Outputs, index: int) -> tuple[list[int], list[int]]:
    """Returns the tokens of a conversation, and these with the next prompt."""
    said = [*PROMPTS[index], *plain[index].tokens]
    return said, [*said, 9, 11, 13]


@pytest.fixture(scope="module")
def next_replies(engine: Engine, plain: Outputs) -> list[list[int]]:
    """The answers to the next prompts."""
    assert engine.speculation is not None
    engine.speculation.drafters = []
    stopping = StoppingParameters(NEXT, ignore_eos=True)
    prompts = [_follow_up(plain, index)[1] for index in range(len(PROMPTS))]
    driver = Driver(engine)
    return [each.tokens for each in driver.run(*(RunningSequence(i, p, stopping) for i, p in enumerate(prompts)))]


def _check_next_replies(engine: Engine, drafter: Drafter, plain: Outputs, expected: list[list[int]]) -> None:
    """Continues conversations with their keys and values, as the prefix cache does."""
    assert engine.speculation is not None
    engine.speculation.drafters = [drafter]
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    size, count = engine.info.block_size, 128 // engine.info.block_size
    first, then = [], []
    for index, (prompt, new) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        own, others = [[each * count + place + 1 for place in range(count)] for each in (2 * index, 2 * index + 1)]
        first.append(RunningSequence(index, prompt, StoppingParameters(new), blocks=own))
        said, following = _follow_up(plain, index)
        computed = len(said) - 1  # nobody asks for the keys and values of the last token
        whole, rest = divmod(computed, size)
        copy = BlockCopy(own[whole], others[whole], rest) if rest else None
        blocks, stopping = own[:whole] + others[whole:], StoppingParameters(NEXT, ignore_eos=True)
        then.append(RunningSequence(index, following, stopping, blocks=blocks, computed=computed, copy=copy))
    driver = Driver(engine)
    assert [output.tokens for output in driver.run(*first)] == [plain[index].tokens for index in range(len(PROMPTS))]
    assert [output.tokens for output in driver.run(*then)] == expected


def test_who_comes_later_does_not_see_what_wrong_drafts_left(
    engine: Engine, plain: Outputs, next_replies: list[list[int]]
) -> None:
    late = {index: [5, *reply] for index, reply in _replies(plain).items()}
    _check_next_replies(engine, Guesses(late, 512), plain, next_replies)


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
    [
        ("itself", 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("eagle", 4), *((name, 1) for name in MODELS)]),
    ],
)
@pytest.mark.parametrize("grow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_replies_are_the_same_with_a_model_that_drafts(
    plain: Outputs, next_replies: list[list[int]], name: str, every: int, grow: bool, tmp_path: Path
) -> None:
    """every: 4: of each kind of request one."""
    engine = _load(MODELS[name](tmp_path / name))
    assert engine.speculation is not None
    drafter = engine.speculation.drafters[-1]
    outputs, driver = _run(engine, [drafter], grow=grow, every=every)
    compare(outputs, plain)
    assert 0 < driver.drafted > driver.accepted
    _check_next_replies(engine, drafter, plain, next_replies)


def _of_shard(group: ShardGroup, name: str, folder: Path | None, replies: Mapping[int, list[int]]) -> Outputs:
    engine = _load(folder, group)
    assert engine.speculation is not None
    drafter = DRAFTERS[name](replies) if name in DRAFTERS else engine.speculation.drafters[-1]
    outputs, driver = _run(engine, [drafter], replies=replies, grow=True)
    assert driver.drafted > 0
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DRAFTERS, *MODELS])
def test_two_shards_write_what_one_writes_without_drafts(plain: Outputs, name: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path / name) if name in MODELS else None
    with Ranks(2) as ranks:
        for outputs in ranks.run(_of_shard, name, folder, _replies(plain)):
            compare(outputs, plain)
