"""A model that does not attend as it is asked to is noticed at load, and never answers wrongly."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from tests.tiny_models import build, make
from tests.unit.engine.probed import by_spec, probed
from tests.unit.engine.requests import expected_tokens, generate_together, load_engine, prompts
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.paged_path import probe_paged_path

TEXTS = prompts((1, 70, 5, 33, 2, 17))


class DeafAttention(LlamaAttention):
    """Attends in its own way, whatever is registered."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        key, value = repeat_kv(key, self.num_key_value_groups), repeat_kv(value, self.num_key_value_groups)
        causal = attention_mask is None and query.shape[2] > 1
        output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, is_causal=causal)
        return self.o_proj(output.transpose(1, 2).flatten(2)), None


class DeafConfig(LlamaConfig):
    model_type = "deaf"


class DeafForCausalLM(LlamaForCausalLM):
    config_class = DeafConfig

    def __init__(self, config: DeafConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = DeafAttention


class Windowless:
    """A configuration as an attention module sees it that leaves its window to the mask."""

    sliding_window = None

    def __init__(self, config: MistralConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class SilentConfig(MistralConfig):
    model_type = "silent"


class SilentForCausalLM(MistralForCausalLM):
    config_class = SilentConfig

    def __init__(self, config: SilentConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.config = Windowless(config)


AutoConfig.register("deaf", DeafConfig)
AutoConfig.register("silent", SilentConfig)
AutoModelForCausalLM.register(DeafConfig, DeafForCausalLM)
AutoModelForCausalLM.register(SilentConfig, SilentForCausalLM)


def save(config_class: type, like: str, folder: Any) -> None:
    source = build(like)
    model = AutoModelForCausalLM.from_config(config_class(**source.config.to_dict() | {"model_type": None}))
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("config_class", "like", "reason"),
    [
        (DeafConfig, "llama", "it called the attention function 0 times in 2 layers"),
        (SilentConfig, "mistral", "its layers look at other tokens than they tell the attention function"),
    ],
)
def test_what_would_be_wrong_on_the_paged_path_takes_the_padded_one(
    config_class, like, reason, tmp_path, caplog
) -> None:
    save(config_class, like, tmp_path)
    with caplog.at_level(logging.INFO, "tgi_server.engine"):
        engine = load_engine(tmp_path)
    assert not engine.info.paged
    assert f"{config_class.model_type} takes the padded path: {reason}" in caplog.text
    assert generate_together(engine, TEXTS) == expected_tokens(tmp_path, TEXTS)


def test_a_model_that_takes_positions_from_elsewhere_is_noticed() -> None:
    model = build("llama")
    forward = model.forward

    def counts_from_zero(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = counts_from_zero  # type: ignore[method-assign]
    with torch.inference_mode():
        assert isinstance(probe_paged_path(model), str)
    assert model.config._attn_implementation == "sdpa"


def test_the_shape_of_keys_is_that_of_the_model() -> None:
    with torch.inference_mode():
        shapes = [by_spec(build("falcon_40b")).kv_shape, probed(build("qwen2"))[0].kv_shape]
    assert [(shape.heads, shape.head_dim) for shape in shapes] == [((2, 2), 16), ((2, 2), 16)]


@pytest.mark.parametrize("architecture", ["bloom", "falcon_rw", "gemma2", "mixtral", "qwen3_moe"])
def test_in_bfloat16_a_model_takes_the_same_path(architecture, tmp_path) -> None:
    assert Engine(EngineConfig(make(architecture, tmp_path), dtype=torch.bfloat16)).info.paged


def undecided() -> PreTrainedModel:
    """A mixture in bfloat16 whose router lets the last bits of numbers choose experts."""
    layers = ["sliding_attention", "full_attention"] * 8
    return build(
        "gpt_oss", num_hidden_layers=16, layer_types=layers, num_local_experts=32, num_experts_per_tok=4
    ).bfloat16()


def test_a_mixture_whose_experts_the_last_bit_chooses_takes_the_paged_path() -> None:
    with torch.inference_mode():
        probed(undecided())


def test_a_deep_model_may_be_rounded_otherwise_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of what 64 layers attend to changes logits by more than the tolerance for shallow models."""
    attend = GatherAttention.attend

    def attend_with_another_last_bit(self, layer, query, metadata, variant):
        attended = attend(self, layer, query, metadata, variant)
        signs = (torch.arange(attended.shape[-1]) % 2 * 2 - 1).to(attended.dtype)
        return attended * (1 + torch.finfo(attended.dtype).eps * signs)

    with torch.inference_mode():
        model = build("llama", num_hidden_layers=64).bfloat16()
        monkeypatch.setattr(GatherAttention, "attend", attend_with_another_last_bit)
        probed(model)


def test_noise_does_not_hide_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = GatherAttention.attend

    def attend_to_the_contrary(self, layer, query, metadata, variant):
        return attend(self, layer, -query, metadata, variant)

    monkeypatch.setattr(GatherAttention, "attend", attend_to_the_contrary)
    with torch.inference_mode():
        model = undecided()
        reason = probe_paged_path(model)
    assert isinstance(reason, str)
    assert "paged attention is off by" in reason
