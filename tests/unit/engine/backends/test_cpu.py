"""Models in one kernel call: the last layer for the tokens that are wanted, and whatever else a pass may bring."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.tiny_models import make
from tgi_server.contract import StoppingParameters
from tgi_server.engine import EngineConfig, RunningSequence
from tgi_server.engine.backends.base import TopOnly
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.runners import create_runner
from tgi_server.engine.runners.base import PromptChunk, Runner
from tgi_server.engine.runners.hidden_states import HiddenStates
from tgi_server.engine.runners.paged import PagedRunner

# Architectures of which a pass is one call, from tokens to logits.
IN_ONE_CALL = ["cohere", "cohere_qk_norm", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "granite"]
IN_ONE_CALL += ["llama", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"]
IN_ONE_CALL += ["bamba", "granitemoehybrid_dense", "lfm2", "olmo_hybrid", "qwen3_5_text"]
IN_ONE_CALL += ["jamba", "qwen3_5_moe_text", "qwen3_next"]
IN_ONE_CALL += ["bloom", "falcon_40b", "gpt2", "gpt_neo", "gptj", "mpt_6_heads", "nemotron"]
IN_ONE_CALL += ["deepseek_v3", "falcon_h1", "granitemoehybrid", "kimi_linear", "mimo_v2_flash", "nemotron_h"]
IN_ONE_CALL += ["gemma3n_text", "gemma4_text", "gemma4_text_moe", "llama4_text"]
# Their parts are those of others, so that they are slow tests.
OF_THE_SAME_PARTS = {"cohere2", "ernie4_5", "exaone4", "helium", "olmo3", "qwen2_moe", "stablelm", "stablelm_parallel"}
OF_THE_SAME_PARTS |= {"arcee", "bloom_6_heads", "falcon_7b", "falcon_11b", "falcon_rw", "galactica", "gpt_neox", "mpt"}
OF_THE_SAME_PARTS |= {"gpt_bigcode_multi_head", "gpt_neox_serial", "phi", "phi_norms", "santacoder", "starcoder2"}
OF_THE_SAME_PARTS |= {"cwm", "hyperclovax", "jais2", "mellum", "ministral", "olmoe", "persimmon", "vaultgemma"}
OF_THE_SAME_PARTS |= {"deepseek_v2", "glm4_moe", "glm4_moe_lite", "lfm2_moe", "minicpm3", "minimax_m2", "youtu"}
IN_ONE_CALL += sorted(OF_THE_SAME_PARTS)
# Of the others only what gives all logits runs by default.
GREEDY_TOO = {"gemma2", "llama", "qwen3_5_text"}


def load(folder: Path, *, keep_hidden_states: bool = False, custom_kernels: bool = True) -> Runner:
    """keep_hidden_states: as a drafter wants them. custom_kernels: False: `transformers` computes the passes."""
    config = EngineConfig(folder, dtype=torch.float32, custom_kernels=custom_kernels)
    model = load_model(config, torch.device("cpu"))
    runner = create_runner(model, config)
    if keep_hidden_states:
        assert isinstance(runner, PagedRunner)
        runner.hidden_states = HiddenStates((0, 1))
    runner.warm_up(4, 128, 128, None)
    return runner


def run(runner: Runner, *, all_logits: bool, greedy: TopOnly | None = None) -> list[Tensor]:
    """Returns the logits of replies in a pass with prompts, one of which it completes, and a draft; and in the next."""
    running, begun, whole = (
        RunningSequence(number, [(7 * place + number) % 90 + 3 for place in range(tokens)], StoppingParameters(4))
        for number, tokens in enumerate((40, 45, 33))
    )
    for sequence in (running, begun, whole):
        sequence.blocks = [1 + 3 * sequence.request_id + place for place in range(3)]
        sequence.state_slot = 1 + sequence.request_id
    runner.truncate(0)
    for tokens in (28, 12):
        runner.forward(0, [PromptChunk.next_of(running, tokens, all_logits=all_logits)], greedy)
    runner.promote(running, 0)
    runner.accept(0, torch.tensor([5]))
    draft = PromptChunk(running, torch.tensor([8, 9]), 41, all_logits=True)
    chunks = [PromptChunk.next_of(each, 33, all_logits=all_logits) for each in (begun, whole)]
    mixed = runner.forward(1, [*chunks, draft], greedy)
    wanted = [0, 66, 67, 68] if all_logits else list(range(4))
    last = runner.forward(1, [PromptChunk.next_of(begun, 12, all_logits=all_logits)], greedy)
    return [mixed[wanted], last[[0, -1]]]


def both_ways(all_logits: object, greedy: object) -> list[object]:
    """Returns each model with both values."""
    return [
        pytest.param(name, value, marks=() if quick else pytest.mark.slow)
        for name in IN_ONE_CALL
        for value, quick in ((all_logits, name not in OF_THE_SAME_PARTS), (greedy, name in GREEDY_TOO))
    ]


class Widened(TorchDispatchMode):
    """Notes of how many tokens the feed-forward part of the last layer is computed, in each pass of two layers."""

    def __init__(self, width: int, tensors: int) -> None:
        """width: of what the up projection computes. tensors: of this width in a layer."""
        super().__init__()
        self._width = width
        self._tensors = tensors
        self._rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.empty.memory_format and list(args[0][1:]) == [self._width]:
            self._rows.append(args[0][0])
        return func(*args, **(kwargs or {}))

    @property
    def rows(self) -> list[int]:
        return self._rows[self._tensors :: 2 * self._tensors]


@pytest.mark.parametrize("keep_hidden_states", [False, True])
@pytest.mark.parametrize(("name", "width", "tensors"), [("llama", 192, 1), ("opt", 96, 2)])
def test_the_last_layer_computes_what_is_wanted(
    name: str, width: int, tensors: int, keep_hidden_states: bool, tmp_path: Path
) -> None:
    runner = load(make(name, tmp_path), keep_hidden_states=keep_hidden_states)
    with torch.inference_mode():
        with Widened(width, tensors) as all_of_them:
            expected = run(runner, all_logits=True)
        assert all_of_them.rows == [28, 12, 69, 13]
        with Widened(width, tensors) as widened:
            computed = run(runner, all_logits=False)
    assert widened.rows == [0, 1, 4, 2]
    for logits, others in zip(computed, expected, strict=True):
        assert torch.allclose(logits, others, atol=1e-4)


@pytest.mark.parametrize(("name", "greedy"), both_ways(None, TopOnly(1, None)))
def test_a_pass_in_one_call_computes_what_transformers_does(name: str, greedy: TopOnly | None, tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    with torch.inference_mode():
        whole, tapped = (
            run(load(folder, keep_hidden_states=kept), all_logits=False, greedy=greedy) for kept in (False, True)
        )
        parts = run(load(folder, custom_kernels=False), all_logits=False)
    for logits, others, expected in zip(whole, tapped, parts, strict=True):
        assert torch.equal(logits, others)
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


def decode(runner: Runner, *, greedy: bool) -> tuple[list[Tensor], bool]:
    """Returns the logits of four steps of three rows, the third of which is chosen otherwise than greedily.

    Returns as well whether the runner gave the likeliest tokens in each.
    """
    for row, tokens in enumerate((40, 5, 33)):
        sequence = RunningSequence(row, list(range(3, 3 + tokens)), StoppingParameters(8))
        sequence.blocks = [1 + 3 * row + place for place in range(3)]
        sequence.state_slot = 1 + row
        runner.forward(0, [PromptChunk.next_of(sequence, tokens)])
        runner.promote(sequence, row)
        runner.accept(row, torch.tensor([7 + row]))
    steps, given = [], []
    for number in range(4):
        rows = 3 if number < 3 else 2
        runner.truncate(rows)
        logits = runner.forward(rows, [], TopOnly(1, None) if greedy else None)
        steps.append(logits)
        given.append(runner.argmax_ids is not None)
        chosen = logits.max(-1).indices if runner.argmax_ids is None else runner.argmax_ids
        if number == 1:
            chosen = chosen.clone()
            chosen[2] = 11
        runner.accept(0, chosen)
    assert len(set(given)) == 1
    return steps, given[0]


def test_the_text_model_of_one_that_sees_images_is_one_call(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3Config(
        text_config=text | {"layer_types": kinds, "max_position_embeddings": 256},
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    with torch.inference_mode():
        whole, in_one_call = decode(load(tmp_path), greedy=True)
        parts, _ = decode(load(tmp_path, custom_kernels=False), greedy=True)
    assert in_one_call
    for logits, expected in zip(whole, parts, strict=True):
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("name", "greedy"), both_ways(False, True))
def test_a_step_in_one_call_computes_what_transformers_does(name: str, greedy: bool, tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    with torch.inference_mode():
        whole, in_one_call = decode(load(folder), greedy=greedy)
        tapped, tapped_in_one_call = decode(load(folder, keep_hidden_states=True), greedy=greedy)
        parts, given = decode(load(folder, custom_kernels=False), greedy=greedy)
    assert in_one_call == tapped_in_one_call == greedy
    assert not given
    for logits, others, expected in zip(whole, tapped, parts, strict=True):
        assert torch.equal(logits, others)
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
