"""The network for multi-token prediction that many checkpoints bring along: one more decoder layer.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024. The layer reads the embedding of a token beside the hidden state that
the model has of the token before. For tokens that the model has not computed yet, its own output stands for these.
"""

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tgi_server.engine.backends import PagedModel, PassInput
from tgi_server.engine.backends.attention.base import AttentionBackend, KVShape
from tgi_server.engine.backends.attention.paged_cache import PagedCache
from tgi_server.engine.backends.generic import attention_implementation, substitute_attention
from tgi_server.engine.checkpoint.cut import cut, surround
from tgi_server.engine.checkpoint.quantized import Quantization
from tgi_server.engine.checkpoint.reader import Checkpoint, open_checkpoint
from tgi_server.engine.errors import InvalidWeights
from tgi_server.engine.models.families import family_of, plan_for
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.shares import share_of

# Names of the modules around the layer: the norms of the embedding and of the hidden state, what joins these, and the
# last norm. In checkpoints like DeepSeek's, the layer has the number behind that of the last one.
_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
# Weights that `transformers` does not convert to the model's dtype.
_IN_FLOAT32 = "e_score_correction_bias"


class MtpModel(nn.Module):
    """The layer and what it carries; its tokens are those behind the ones whose features it gets.

    features: [tokens, hidden_size]; inputs of the model's last norm, of those tokens of the next pass that do not
    decode, or None for zeros. carried: [rows, hidden_size]; what the layer has made of each row, which is its input in
    the next pass.
    """

    def __init__(self, model: PreTrainedModel, config: PretrainedConfig, layer_type: type[nn.Module]) -> None:
        """model: the one that it drafts for. config, layer_type: of the layer. The weights are on no device yet."""
        super().__init__()
        decoder: Any = model.get_decoder()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.token_norm, self.hidden_norm, self.norm = (type(decoder.norm)(size, eps=eps) for _ in range(3))
            self.joined = nn.Linear(2 * size, size, bias=False)
            self.layer: Any = layer_type(config, 0)
        # Not modules of this one: they belong to the model.
        self._of_model = decoder.norm, decoder.rotary_emb, model.get_input_embeddings(), model.get_output_embeddings()
        self.features: Tensor | None = None
        self.carried = torch.empty(0, size, device=model.device, dtype=model.dtype)

    def hold(self, rows: int) -> None:
        """Allocates the hidden states that rows carry from one pass to the next."""
        self.carried = self.carried.new_zeros(rows, self.carried.shape[1])

    def forward(self, inputs: PassInput, cache: PagedCache) -> Tensor:
        """Returns logits, [rows, vocab_size]."""
        final_norm, rotary, embedding, head = self._of_model
        tokens = embedding(inputs.tokens)
        before = self._inputs(len(tokens), inputs.metadata.decoding, final_norm)
        hidden = self.joined(torch.cat([self.token_norm(tokens), self.hidden_norm(before)], -1))[None]
        positions = inputs.positions[None]
        output = self.layer(
            hidden,
            attention_mask=hidden.new_zeros(1, 1, 1, 1),  # which nothing reads; layers with an index take a part of it
            position_ids=positions,
            past_key_values=cache,
            position_embeddings=rotary(hidden, position_ids=positions),
        )
        output = output[0] if isinstance(output, tuple) else output  # beside what sparse attention has chosen
        output = self.norm(output[0] if inputs.wanted is None else output[0, inputs.wanted])
        rows = min(len(output), len(self.carried))
        self.carried[:rows] = output[:rows]
        logits: Tensor = head(output)
        return logits

    def _inputs(self, tokens: int, decoding: int, final_norm: nn.Module) -> Tensor:
        """Returns what the rows that decode carry, and then hidden states: [tokens, hidden_size]."""
        if decoding == tokens:
            return self.carried[:decoding]
        features, self.features = self.features, None
        if features is None:
            features = self.carried.new_zeros(tokens - decoding, self.carried.shape[1])
        return torch.cat([self.carried[:decoding], final_norm(features)])


class PagedMtp(PagedModel):
    """The network over KV blocks of its own."""

    source: MtpModel

    def __init__(self, source: MtpModel, attention: AttentionBackend) -> None:
        super().__init__(source, attention)
        self._cache = PagedCache(attention)
        self._cache.attach(source)

    def forward(self, inputs: PassInput) -> Tensor:
        self._cache.backend, self._cache.metadata = self.attention, inputs.metadata
        logits: Tensor = self.source(inputs, self._cache)
        return logits


def read_mtp(
    folder: Path,
    model: PreTrainedModel,
    layer_type: type[nn.Module],
    quantization: Quantization | None,
    group: ShardGroup | None,
) -> MtpModel | None:
    """Returns the network in a model's own checkpoint; None if it has none that is known.

    layer_type: the class of the model's last decoder layer. group: the shards of the model, when this is one of them;
    then the layer is split as the model is. Raises InvalidWeights.
    """
    text = model.config.get_text_config(decoder=True)
    if not family_of(text).mtp:
        return None
    plan = plan_for(text) if group else None
    share = share_of(group.rank, group.world_size, plan.heads) if group and plan else None
    with open_checkpoint(folder, plan, share, quantization) as tensors:
        prefixes = _prefixes(tensors, text.num_hidden_layers)
        if prefixes is None:
            return None
        network = MtpModel(model, _config_of(text), layer_type)
        if plan and share:
            cut(network.layer, plan, share, text)
        parts = network.token_norm, network.hidden_norm, network.joined, network.norm, network.layer
        for part, prefix in zip(parts, prefixes, strict=True):
            _fill(part, prefix, tensors, model)
    if group and plan and share:
        surround(network.layer, plan, share, group, text)
    substitute_attention(network.layer, family_of(text).attention)
    return network.eval().requires_grad_(False)


def _prefixes(tensors: Checkpoint, layers: int) -> list[str] | None:
    """Returns how names begin of the four modules around the layer, and of the layer itself; None if there is none.

    layers: of the model; the one behind the last of them is that of DeepSeek.
    """
    for names, layer, pattern in (
        (_DEEPSEEK, "", rf"(.*\blayers\.{layers}\.)eh_proj\.weight"),
        (_QWEN, "layers.0.", r"(.*\bmtp\.)fc\.weight"),
    ):
        found = next(filter(None, (re.fullmatch(pattern, name) for name in tensors)), None)
        if found is not None:
            return [*(f"{found[1]}{name}." for name in names), f"{found[1]}{layer}"]
    return None


def _config_of(text: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration by which the family's decoder layer is one with attention and its usual experts."""
    config: Any = copy.deepcopy(text)
    config._attn_implementation = attention_implementation(family_of(text).attention)
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
        "indexer_types": ["full"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _fill(module: nn.Module, prefix: str, tensors: Checkpoint, model: PreTrainedModel) -> None:
    """Reads the weights of a module, whose names in the checkpoint begin with `prefix`. Raises InvalidWeights."""
    weights: dict[str, Tensor] = {}
    for name, empty in module.state_dict().items():
        weight = _read(prefix + name, tensors)
        if weight.shape != empty.shape:
            raise InvalidWeights(
                f"shapes differ from config.json: {prefix}{name} is {list(weight.shape)}, not {list(empty.shape)}"
            )
        dtype = torch.float32 if name.endswith(_IN_FLOAT32) else model.dtype
        weights[name] = weight.to(model.device, dtype)
    module.load_state_dict(weights, assign=True)


def _read(name: str, tensors: Checkpoint) -> Tensor:
    """Returns a tensor by its name in `transformers`, for which those of experts may have to be stacked."""
    if name in tensors:
        return tensors[name][...]
    path, _, joined = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(joined)
    first = f"{path}.0.{parts[0]}.weight" if parts else name
    if parts is None or first not in tensors:
        raise InvalidWeights(f"tensor {first} is missing, which the layer for multi-token prediction needs")
    experts: list[Tensor] = []
    while f"{path}.{len(experts)}.{parts[0]}.weight" in tensors:
        experts.append(torch.cat([tensors[f"{path}.{len(experts)}.{part}.weight"][...] for part in parts]))
    return torch.stack(experts)


def kv_shape(of_model: KVShape) -> KVShape:
    """Returns what one token leaves in the cache: as much as in the model's last layer with keys."""
    layer = max(index for index, heads in enumerate(of_model.heads) if heads)
    return KVShape((of_model.heads[layer],), of_model.head_dim_of(layer), None, of_model.value_dim)
