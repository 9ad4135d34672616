"""Layers for multi-token prediction in the checkpoints of models: found by themselves, right ones and random ones."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_models import NOISE, build, make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.requests import load_engine
from tests.unit.engine.runners.test_parity import quick
from tests.unit.engine.speculation.succession import follower, head_for, watch_drafts
from tgi_server.contract import SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import InvalidWeights
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.eagle import Eagle

HIDDEN, LAYERS, NEW = 64, 2, 25
PROMPTS = [[5, 9, 77], list(range(3, 60)), [8]]
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", *QWEN)


def save(architecture: str, folder: Path, *, right: bool = False, layers: int = LAYERS) -> Path:
    """Saves a model with a layer for multi-token prediction, which is random, or right about a model whose tokens each
    say which one is next. layers: of the model alone.
    """
    settings: dict[str, Any] = {"num_hidden_layers": layers + 1}
    if architecture in QWEN:
        settings["layer_types"] = ["linear_attention", "full_attention", "full_attention"]
    if architecture == "glm_moe_dsa":
        settings["indexer_types"] = ["full", "shared", "full"]
    model = build(architecture, **settings)
    if right:
        _make_succession(model)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = f"model.layers.{layers}."
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    if architecture in QWEN:
        tensors = {name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        prefix, names = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    own = dict(zip(names, _around(tensors["model.norm.weight"], right=right), strict=True))
    save_file(tensors | {f"{prefix}{name}.weight": own[name] for name in names}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if config.get(name):
            del config[name][layers:]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _around(norm: Tensor, *, right: bool) -> tuple[Tensor, ...]:
    """Returns the two norms, what joins their outputs (where it is right, only the token counts), and the last norm."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        if right:
            both = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
            return norm.clone(), norm.clone(), both, norm.clone()
        norms = [norm + NOISE * torch.randn_like(norm) for _ in range(3)]
        return norms[0], norms[1], torch.randn(HIDDEN, 2 * HIDDEN) * 0.12, norms[2]


@torch.no_grad()
def _make_succession(model: PreTrainedModel) -> None:
    """Makes a model whose layers add nothing, so that the head gets the embedding of the last token."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.zero_()
    norm: Any = model.get_decoder().norm
    norm.weight.fill_(0.0 if norm(torch.ones(1, HIDDEN)).norm() > 1.5 * norm.weight.norm() else 1.0)
    model.lm_head.weight.copy_(head_for(model, 1))  # type: ignore[arg-type, union-attr, operator]


def engine_of(folder: Path, group: ShardGroup | None = None, **settings) -> Engine:
    engine = load_engine(folder, group=group, **settings)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
    if engine.speculation is not None:
        engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    return engine


def sequences() -> list[RunningSequence]:
    """The second one is sampled."""
    sampling = [SamplingParameters(), SamplingParameters(do_sample=True, temperature=0.8, seed=3), SamplingParameters()]
    return [
        RunningSequence(i, prompt, StoppingParameters(NEW, ignore_eos=True), sampling[i])
        for i, prompt in enumerate(PROMPTS)
    ]


def run(group: ShardGroup | None, folder: Path, speculate: int) -> tuple[list[list[int]], int, int]:
    """Returns the tokens, and how many were drafted and accepted."""
    driver = Driver(engine_of(folder, group, speculate=speculate))
    for sequence, chunks in zip(sequences(), ([], [20, 30, 7], []), strict=True):
        driver.add(sequence, chunks)
    driver.run()
    return [driver.outputs[i].tokens for i in range(len(PROMPTS))], driver.drafted, driver.accepted


@pytest.mark.parametrize("architecture", quick(FAMILIES, {"qwen3_next"}))
def test_a_layer_that_is_right_brings_all_its_tokens(architecture: str, tmp_path: Path) -> None:
    engine = engine_of(save(architecture, tmp_path, right=True), speculate=3)
    driver = Driver(engine)
    (output,) = driver.run(sequences()[0])
    assert output.tokens == [follower(PROMPTS[0][-1], 1 + place) for place in range(NEW)]
    assert driver.accepted == driver.drafted > 0
    assert [each.drafted for each in output.generations] == [False, *([True, True, True, False] * NEW)[: NEW - 1]]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_drafts_of_a_random_layer_leave_no_trace(architecture: str, tmp_path: Path) -> None:
    folder = save(architecture, tmp_path)
    expected, *_ = run(None, folder, 0)
    tokens, drafted, accepted = run(None, folder, 3)
    assert tokens == expected
    assert accepted < drafted


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
def test_shards_draft_as_well(architecture: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    folder = save(architecture, tmp_path, right=True)
    alone = run(None, folder, 3)
    assert ranks_of(2).run(run, folder, 3) == [alone, alone]
    assert alone[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text"])
def test_drafts_are_those_of_the_layer_in_transformers(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference computes all tokens from the first one on for each draft of one token."""
    layers = importlib.import_module("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers has no layers for multi-token prediction")
    folder = save(architecture, tmp_path)
    engine = engine_of(folder, speculate=1)
    assert engine.speculation is not None
    drafter = engine.speculation.drafters[-1]
    assert isinstance(drafter, Eagle)
    seen = watch_drafts(drafter, monkeypatch)
    Driver(engine).run(*sequences())
    assert len(seen) > NEW
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*", "^mtp.*"]  # of the layers' names
    network = layers.MtpModel.from_pretrained(model)
    with torch.inference_mode():
        for tokens, draft in seen[:: len(seen) // 12]:
            hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
            ids, positions = torch.tensor([tokens[1:]]), torch.arange(len(tokens) - 1)[None]
            output = network.forward_layer(0, hidden, positions, None, input_ids=ids)
            assert draft == [int(model.lm_head(output[0, -1]).argmax())]


def test_models_whose_layers_are_called_otherwise_draft_from_texts(tmp_path: Path) -> None:
    engine = load_engine(make("gpt2", tmp_path), speculate=2)
    assert engine.speculation is not None
    assert not any(isinstance(each, Eagle) for each in engine.speculation.drafters)


def test_a_layer_that_is_not_whole_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    file = save("deepseek_v3", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidWeights, match=r"tensor model\.layers\.2\.hnorm\.weight is missing"):
        load_engine(tmp_path, speculate=2)
