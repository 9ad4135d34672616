"""A model of real shapes with random weights, made where it runs: nothing of it is ever in a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from benchmarks.floor import ModelCost

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_hidden_layers=32,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    bos_token_id=128000,
    eos_token_id=128001,
)
"""The shape of Llama 3.1 8B, without its scaling of positions."""
SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
)
"""To try the measurements themselves, on any machine."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the floor has to know of a model. kv_bytes: that one token leaves in the cache.

    attention_flops: of one query with one key, in all layers.
    """

    cost: ModelCost
    kv_bytes: int
    attention_flops: int


def build(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """In evaluation mode; the same weights on every device of a kind."""
    torch.manual_seed(0)
    with device, _default_dtype(dtype):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    return model.eval().requires_grad_(False)


def shape_of(model: PreTrainedModel) -> Shape:
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    head = model.get_output_embeddings().weight.numel()
    layers = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear)) - head
    size = model.dtype.itemsize
    return Shape(
        ModelCost((layers + head) * size, 2 * layers, 2 * head),
        kv_bytes=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * size,
        attention_flops=4 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
