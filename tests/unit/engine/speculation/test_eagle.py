"""EAGLE-3 in the format that vLLM and SGLang load: networks that are right, random ones, and those that do not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.tiny_models import VOCAB_SIZE, build, make
from tests.unit.engine.requests import load_engine
from tests.unit.engine.speculation.succession import follower, head_for, succession_llama, watch_drafts
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.speculation.costs import StepCosts

HIDDEN = 64
NEW = 25
SETTINGS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HIDDEN,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}
PROMPTS = [[5, 9, 77], list(range(3, 60)), [8]]


def _zeros(head: Tensor) -> dict[str, Tensor]:
    """A network whose layer adds nothing."""
    square, wide = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return (
        {f"midlayer.self_attn.{name}_proj.weight": wide.clone() for name in "qkv"}
        | {f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in norms}
        | {f"midlayer.mlp.{name}_proj.weight": torch.zeros(96, HIDDEN) for name in ("gate", "up")}
        | {"midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, 96), "midlayer.self_attn.o_proj.weight": square}
        | {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN), "lm_head.weight": head}
    )


def _reading_tokens(head: Tensor) -> dict[str, Tensor]:
    """A network that gives its head the embedding of the token: each attends to those of its own kind.

    With `norm_before_residual`, next to nothing is left of what it carries from one token to the next.
    """
    one = torch.eye(HIDDEN)
    token = torch.cat([one, torch.zeros(HIDDEN, HIDDEN)], 1)
    return _zeros(head) | {
        "midlayer.hidden_norm.weight": torch.full((HIDDEN,), 1e-3),
        "midlayer.self_attn.q_proj.weight": 3 * token,
        "midlayer.self_attn.k_proj.weight": 3 * token,
        "midlayer.self_attn.v_proj.weight": token,
        "midlayer.self_attn.o_proj.weight": one,
    }


def random_network() -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        weights = _zeros(torch.zeros(VOCAB_SIZE, HIDDEN))
        return {
            name: torch.randn_like(weight) * 0.2 if weight.dim() > 1 else 1 + 0.2 * torch.randn_like(weight)
            for name, weight in weights.items()
        }


def save_network(folder: Path, weights: dict[str, Tensor], **settings) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS | settings))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def _engine(folder: Path, eagle: Path, **settings) -> Engine:
    engine = load_engine(folder, speculative_model=eagle, **settings)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    return engine


def _sequences() -> list[RunningSequence]:
    return [RunningSequence(i, prompt, StoppingParameters(NEW, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)]


def _drafted(driver: Driver) -> list[bool]:
    return [generation.drafted for generation in driver.outputs[0].generations]


@pytest.mark.parametrize("custom_kernels", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_network_that_is_right_brings_all_its_tokens(tmp_path: Path, custom_kernels: bool) -> None:
    model = succession_llama(tmp_path / "model")
    eagle = save_network(tmp_path / "eagle", _reading_tokens(head_for(model, 1)), norm_before_residual=True)
    driver = Driver(_engine(tmp_path / "model", eagle, speculate=3, custom_kernels=custom_kernels))
    for output, prompt in zip(driver.run(*_sequences()), PROMPTS, strict=True):
        assert output.tokens == [follower(prompt[-1], 1 + place) for place in range(NEW)]
    assert driver.accepted == driver.drafted > 0
    assert _drafted(driver) == [False, *([True, True, True, False] * NEW)[: NEW - 1]]


def test_features_are_those_of_the_token_before(tmp_path: Path) -> None:
    model = succession_llama(tmp_path / "model")
    weights = _zeros(head_for(model, 2))
    weights["fc.weight"][:, HIDDEN : 2 * HIDDEN] = torch.eye(HIDDEN)
    driver = Driver(_engine(tmp_path / "model", save_network(tmp_path / "eagle", weights), speculate=1))
    driver.run(*_sequences())
    assert driver.accepted == driver.drafted > 0
    assert _drafted(driver) == [False, *([True, False] * NEW)[: NEW - 1]]


def test_a_smaller_vocabulary_stands_for_some_of_the_models(tmp_path: Path) -> None:
    model = succession_llama(tmp_path / "model")
    known = torch.tensor([token for token in range(VOCAB_SIZE) if token % 5])
    weights = _reading_tokens(head_for(model, 1)[known]) | {"d2t": known - torch.arange(len(known))}
    eagle = save_network(tmp_path / "eagle", weights, draft_vocab_size=len(known), norm_before_residual=True)
    driver = Driver(_engine(tmp_path / "model", eagle, speculate=1))
    (output,) = driver.run(_sequences()[0])
    for generation in output.generations[1:]:
        assert not (generation.drafted and generation.token_id % 5 == 0)
    assert driver.accepted > NEW // 4


def test_drafts_are_those_of_the_network_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights, in prompts of one chunk and of several, beside drafts that are wrong."""
    folder = make("llama", tmp_path / "model", num_hidden_layers=4)
    weights = random_network()
    engine = _engine(folder, save_network(tmp_path / "eagle", weights), speculate=3)
    drafter = engine.speculation.drafters[-1] if engine.speculation else None
    assert drafter is not None
    seen = watch_drafts(drafter, monkeypatch)
    driver = Driver(engine)
    for sequence, chunks in zip(_sequences(), ([], [20, 30, 7], []), strict=True):
        driver.add(sequence, chunks)
    outputs = driver.run()
    assert [output.tokens for output in driver.outputs.values()] == _plain(folder)
    assert len(seen) > NEW
    assert outputs == []
    model = build("llama", num_hidden_layers=4)
    assert isinstance(model, LlamaForCausalLM)
    for tokens, draft in seen[:: len(seen) // 12]:
        assert draft == _reference(model, weights, tokens, len(draft))


def _reference(model: LlamaForCausalLM, weights: dict[str, Tensor], tokens: list[int], count: int) -> list[int]:
    """Returns a draft. For each of its tokens, computes all tokens from the first one on."""
    config = LlamaConfig(**SETTINGS)
    with torch.inference_mode():
        states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = torch.cat([states[layer][0] for layer in (1, 2, 3)], -1) @ weights["fc.weight"].T
        tokens, length = list(tokens), len(tokens)
        for _ in range(count):
            output = _layer(config, weights, model.model.embed_tokens(torch.tensor(tokens[1:])), hidden)
            normed = rms_norm(output, (HIDDEN,), weights["norm.weight"], 1e-6)
            tokens.append(int((normed[-1] @ weights["lm_head.weight"].T).argmax()))
            hidden = torch.cat([hidden, output[-1:]])
    return tokens[length:]


def _layer(config: LlamaConfig, weights: dict[str, Tensor], embeddings: Tensor, hidden: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"midlayer.{name}_proj.weight"].T

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, (HIDDEN,), weights[f"midlayer.{name}.weight"], 1e-6)

    x = torch.cat([norm("input_layernorm", embeddings), norm("hidden_norm", hidden)], -1)
    query, key, value = (linear(f"self_attn.{name}", x)[None, None] for name in "qkv")
    query, key = apply_rotary_pos_emb(query, key, *LlamaRotaryEmbedding(config)(x[None], torch.arange(len(x))[None]))
    attended = scaled_dot_product_attention(query, key, value, is_causal=True)[0, 0]
    hidden = hidden + linear("self_attn.o", attended)
    widened = norm("post_attention_layernorm", hidden)
    return hidden + linear("mlp.down", silu(linear("mlp.gate", widened)) * linear("mlp.up", widened))


def _plain(folder: Path) -> list[list[int]]:
    engine = load_engine(folder)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
    return [output.tokens for output in Driver(engine).run(*_sequences())]


def test_features_are_stored_for_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a draft is worth it, or there are too many of them; then drafts are right at once."""
    model = succession_llama(tmp_path / "model")
    engine = _engine(
        tmp_path / "model",
        save_network(tmp_path / "eagle", _reading_tokens(head_for(model, 1)), norm_before_residual=True),
        speculate=3,
    )
    assert engine.speculation is not None
    passes = 0
    drafter = engine.speculation.drafters[-1]
    forward = drafter._runner.forward  # type: ignore[attr-defined]

    def counted(*arguments):
        nonlocal passes
        passes += 1
        return forward(*arguments)

    monkeypatch.setattr(drafter._runner, "forward", counted)  # type: ignore[attr-defined]
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 100.0})
    driver = Driver(engine)
    driver.add(RunningSequence(1, PROMPTS[0], StoppingParameters(60, ignore_eos=True)))
    for _ in range(40):
        driver.step()
    assert (driver.drafted, passes) == (0, 1)
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})
    driver.run()
    assert driver.accepted == driver.drafted > 0


def test_networks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model", num_hidden_layers=4)
    head = torch.zeros(VOCAB_SIZE, HIDDEN)
    for number, (weights, settings, error, reason) in enumerate(
        [
            ({"fc.weight": torch.zeros(HIDDEN, 96)}, {}, UnsupportedModel, "hidden size of 32, but the model has 64"),
            (
                {},
                {"num_hidden_layers": 2},
                UnsupportedModel,
                "has 2 layers of the kind llama; for EAGLE-3 only one Llama",
            ),
            ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, UnsupportedModel, r"\[1, 2, 4\] are not three of 4"),
            ({}, {"eagle_aux_hidden_state_layer_ids": None}, UnsupportedModel, r"\[1, 2\] are not three of 4"),
        ]
    ):
        eagle = save_network(tmp_path / str(number), _zeros(head) | weights, **settings)
        with pytest.raises(error, match=reason):
            load_engine(folder, speculative_model=eagle)
    weights = _zeros(head)
    del weights["fc.weight"]
    with pytest.raises(InvalidWeights, match=r"tensor fc\.weight is missing, which EAGLE-3 needs"):
        load_engine(folder, speculative_model=save_network(tmp_path / "none", weights))
