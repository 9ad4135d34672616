import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.adapters import make_adapter, rewrite
from tests.quantized_models import make_quantized
from tests.tiny_models import make
from tgi_server.engine.errors import InvalidAdapter
from tgi_server.engine.lora import AdapterLayer, BaseModel, read_adapter


class Base:
    """A tiny model, as transformers has it and as the reader sees it."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        self.model = factory.from_pretrained(folder)
        self.read = BaseModel.of(folder, config)

    def check(self, adapter: dict[str, AdapterLayer], merged: Any) -> None:
        """Checks that merging gives peft's weights in the layers that the adapter changes; others must be equal."""
        for path in self.read.layers:
            weight, bias = _tensors(self.model, path, self.read)
            new_weight, new_bias = _tensors(merged, path, self.read)
            if path in adapter:
                weight, bias = adapter[path].merged(weight, bias)
            torch.testing.assert_close(weight, new_weight, rtol=1e-5, atol=1e-5)
            assert (bias is None) == (new_bias is None)
            if bias is not None:
                torch.testing.assert_close(bias, new_bias, rtol=1e-5, atol=1e-5)


def _tensors(model: Any, path: str, base: BaseModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    module = model.get_submodule(path)
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    return (weight.T if base.layers[path].transposed else weight), bias


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny models by their architecture, made when they are first needed."""
    made: dict[str, Base] = {}

    def of(architecture: str) -> Base:
        if architecture not in made:
            made[architecture] = Base(make(architecture, tmp_path_factory.mktemp(architecture)))
        return made[architecture]

    return of


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"r": 4, "lora_alpha": 16, "target_modules": [*ATTENTION, "up_proj", "down_proj", "lm_head"]}),
        (
            "llama",
            {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], "use_rslora": True}
            | {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "o_proj": 8}, "alpha_pattern": {"o_.roj": 5}},
        ),
        pytest.param("llama", {"r": 4, "target_modules": ATTENTION, "use_dora": True}, marks=pytest.mark.slow),
        ("opt", {"r": 1, "target_modules": ["q_proj", "fc1"], "bias": "lora_only"}),
        ("opt", {"r": 3, "target_modules": ["q_proj", "fc2"], "bias": "lora_only", "use_dora": True}),
        ("opt", {"r": 2, "target_modules": ["v_proj", "fc2"], "lora_bias": True}),
        ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
        ("phi3", {"r": 5, "target_modules": ["qkv_proj", "gate_up_proj"]}),
        pytest.param("gpt_neox", {"r": 2, "target_modules": "all-linear"}, marks=pytest.mark.slow),
        ("t5", {"r": 2, "target_modules": ["q", "wo"], "use_dora": True}),
    ],
)
def test_every_format_becomes_the_change_that_peft_merges(
    bases: Any, tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    base = bases(architecture)
    folder, merged = make_adapter(base.model, tmp_path, **settings)
    adapter = read_adapter(folder, base.read)
    assert adapter
    base.check(adapter, merged)


def test_bin_files_are_read_too(bases: Any, tmp_path: Path) -> None:
    folder, merged = make_adapter(bases("llama").model, tmp_path, r=2, target_modules=["q_proj"])
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    bases("llama").check(read_adapter(folder, bases("llama").read), merged)


def test_tensors_of_16_bits_are_read_as_float32(bases: Any, tmp_path: Path) -> None:
    folder, _ = make_adapter(bases("llama").model, tmp_path, r=2, target_modules=["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    whole = read_adapter(folder, bases("llama").read)
    rewrite(folder, {name: tensor.half() for name, tensor in tensors.items()})
    adapter = read_adapter(folder, bases("llama").read)
    for path, layer in adapter.items():
        assert layer.a.dtype is layer.b.dtype is torch.float32
        torch.testing.assert_close(layer.b, whole[path].b, rtol=1e-3, atol=1e-3)


def test_layers_that_the_adapter_joins_are_split(bases: Any, tmp_path: Path) -> None:
    """As in a LoRA that was trained with one layer for queries, keys and values, for a base model with three."""
    base = bases("llama")
    folder, _ = make_adapter(base.model, tmp_path, r=2, target_modules=["q_proj"])
    a, b = torch.randn(2, 64), torch.randn(64 + 32 + 32, 2)
    path = "base_model.model.model.layers.0.self_attn.qkv_proj"
    rewrite(folder, {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b})
    layers = read_adapter(folder, base.read)
    assert [path.rpartition(".")[2] for path in layers] == ["q_proj", "k_proj", "v_proj"]
    scale = 8 / 2
    torch.testing.assert_close(torch.cat([layer.b for layer in layers.values()]), b * scale)
    assert all(torch.equal(layer.a, a) for layer in layers.values())


def test_dora_on_a_quantised_base_takes_the_norms_of_what_its_codes_stand_for(tmp_path: Path) -> None:
    quantized, dense = make_quantized("gptq", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(dense)
    folder, merged = make_adapter(
        model, tmp_path / "adapter", r=2, target_modules=["q_proj", "down_proj"], use_dora=True
    )
    base = Base(dense)
    base.read = BaseModel.of(quantized, AutoConfig.from_pretrained(quantized))
    base.check(read_adapter(folder, base.read), merged)


def test_rows_of_zeros_stay_zeros_with_dora(tmp_path: Path) -> None:
    """As those of a head that has more rows than there are tokens."""
    folder = make("llama", tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][-3:] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    base = Base(folder)
    adapter, _ = make_adapter(base.model, tmp_path / "adapter", r=2, target_modules=["lm_head"], use_dora=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    head = "base_model.model.lm_head"
    tensors[f"{head}.lora_B.weight"][-3:] = 0
    tensors[f"{head}.lora_magnitude_vector"][-3:] = 0
    rewrite(adapter, tensors)
    merged, _ = read_adapter(adapter, base.read)["lm_head"].merged(weights["lm_head.weight"], None)
    assert not merged[-3:].any()


def test_a_tied_head_takes_its_weight_from_the_embeddings(bases: Any, tmp_path: Path) -> None:
    base = bases("opt")
    folder, _ = make_adapter(base.model, tmp_path, r=2, target_modules=["lm_head"], use_dora=True)
    assert read_adapter(folder, base.read)["lm_head"].dora_scale is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"a_future_setting": {"x": 1}}, "a_future_setting is"),
        ({"r": "four"}, "not as peft writes it"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern has the regular expression '\('.* unclosed group"),
        ({"rank_pattern": {"a)|(b": 4}}, r"rank_pattern has the regular expression 'a\)\|\(b'.* unopened group"),
        ({"alpha_pattern": {"(?=a)b": 4}}, "alpha_pattern has .* which is not supported: look-around"),
        ({"alpha_pattern": {"((a{1000}){1000}){1000}": 4}}, "which counts repetitions; use the names of layers"),
        ({"rank_pattern": {".*" * 51: 4}}, r"of 102 characters; it may have 100"),
        ({"rank_pattern": {f"q{number}+": 4 for number in range(21)}}, "has 21 regular expressions; it may have 20"),
        ({"rank_pattern": {f"q{number}": 4 for number in range(1001)}}, "has 1001 keys; it may have 1000"),
        ({"r": 8}, r"lora_A.weight has the rank 4, where adapter_config.json says 8"),
        ({"use_dora": True}, "has no lora_magnitude_vector beside it"),
    ],
)
def test_settings_that_are_not_honoured_are_refused_by_name(
    bases: Any, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder, _ = make_adapter(bases("llama").model, tmp_path, r=4, target_modules=["q_proj"])
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(InvalidAdapter, match=message):
        read_adapter(folder, bases("llama").read)


def test_a_pattern_that_backtracks_takes_no_longer_than_others(bases: Any, tmp_path: Path) -> None:
    """In the backtracking engine of `re`, each further repetition doubles the time: these would take years."""
    folder, _ = make_adapter(bases("llama").model, tmp_path, r=4, target_modules=["q_proj"])
    file = folder / "adapter_config.json"
    patterns = {f"{'(.*)*' * repetitions}{number}!": 8 for number, repetitions in enumerate([1, 8, 16] * 6)}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": patterns, "alpha_pattern": patterns}))
    assert all(len(layer.a) == 4 for layer in read_adapter(folder, bases("llama").read).values())


def test_the_first_key_of_a_pattern_that_matches_decides(bases: Any, tmp_path: Path) -> None:
    keys = {r"layers\.1\..*": 3, "model.layers.0.self_attn.q_proj": 5, "q_proj": 7, "^lm_head": 6, "lm_head": 9}
    targets = ["q_proj", "o_proj", "lm_head"]
    folder, merged = make_adapter(
        bases("llama").model, tmp_path, r=2, target_modules=targets, rank_pattern=keys, alpha_pattern=keys
    )
    adapter = read_adapter(folder, bases("llama").read)
    ranks = {path: len(layer.a) for path, layer in adapter.items()}
    assert ranks == {
        "model.layers.0.self_attn.q_proj": 5,
        "model.layers.0.self_attn.o_proj": 2,
        "model.layers.1.self_attn.q_proj": 3,
        "model.layers.1.self_attn.o_proj": 3,
        "lm_head": 6,
    }
    bases("llama").check(adapter, merged)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.lora_A.weight": torch.zeros(4, 65)}, r"q_proj.lora_A.weight has the shape \[4, 65\].* needs \[4, 64\]"),
        ({f"{Q}.lora_B.weight": torch.zeros(96, 4)}, r"q_proj.lora_B.weight has the shape \[96, 4\]"),
        ({f"{Q}.lora_B.weight": None}, "q_proj.lora_A.weight has no lora_B.weight beside it"),
        ({f"{Q}.lora_A.weight": torch.zeros(4, 64).int()}, "dtype torch.int32"),
        (
            {f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)},
            "q_proj.lora_A.weight has numbers that are not finite",
        ),
        ({f"{Q}.bias": torch.zeros(64)}, "q_proj.bias is a bias, where"),
        ({f"{Q}s.lora_A.weight": torch.zeros(4, 64)}, "is for model.layers.0.self_attn.q_projs, which is not a linear"),
        (
            {"base_model.model.model.embed_tokens.weight": torch.zeros(203, 64)},
            r"embed_tokens.weight has the shape \[203",
        ),
        ({"base_model.model.model.embed_tokens.weight": torch.zeros(199, 64)}, "embed_tokens.weight differs from"),
        ({"base_model.model.score.weight": torch.zeros(2, 64)}, "score.weight is not of a LoRA"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 199)}, "lora_embedding_A is not of a"),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(203, 4),
            },
            r"lm_head.lora_B.weight has the shape \[203, 4\].* needs \[199, 4\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_base_model_are_refused_by_name(
    bases: Any, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    folder, _ = make_adapter(bases("llama").model, tmp_path, r=4, target_modules=["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors") | changes
    rewrite(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(InvalidAdapter, match=message):
        read_adapter(folder, bases("llama").read)


@pytest.mark.parametrize("rank", [1, 256, 257])
def test_ranks_go_from_1_to_256(bases: Any, tmp_path: Path, rank: int) -> None:
    folder, _ = make_adapter(bases("llama").model, tmp_path, r=rank, target_modules=["q_proj"])
    if rank <= 256:
        assert all(len(layer.a) == rank for layer in read_adapter(folder, bases("llama").read).values())
    else:
        with pytest.raises(InvalidAdapter, match="has the rank 257; it must be from 1 to 256"):
            read_adapter(folder, bases("llama").read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_numbers_are_read_whatever_their_sum_is(bases: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    folder, _ = make_adapter(bases("llama").model, tmp_path, r=4, target_modules=["q_proj"])
    rewrite(folder, {**load_file(folder / "adapter_model.safetensors"), **large(dtype)})
    read_adapter(folder, bases("llama").read)
    infinite = large(dtype)
    infinite[f"{Q}.lora_A.weight"][0, :2] = torch.tensor([torch.inf, -torch.inf])
    rewrite(folder, {**load_file(folder / "adapter_model.safetensors"), **infinite})
    with pytest.raises(InvalidAdapter, match=r"q_proj.lora_A.weight has numbers that are not finite"):
        read_adapter(folder, bases("llama").read)


def large(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {f"{Q}.lora_A.weight": torch.full((4, 64), 3e38, dtype=dtype)}


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("never").write_text, ("x",))


def test_a_pickle_that_holds_more_than_tensors_is_not_read(bases: Any, tmp_path: Path) -> None:
    folder, _ = make_adapter(bases("llama").model, tmp_path, r=4, target_modules=["q_proj"])
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidAdapter, match="has neither"):
        read_adapter(folder, bases("llama").read)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"x": Harmful()}))
    with pytest.raises(InvalidAdapter, match="more than tensors"):
        read_adapter(folder, bases("llama").read)
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(InvalidAdapter, match="corrupt"):
        read_adapter(folder, bases("llama").read)
