"""The network of EAGLE-3: one decoder layer over the model's own hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. Its layer
reads the embedding of a token beside the features of the token before: hidden states of three layers of the model,
projected to one. For tokens that the model has not computed yet, its own output stands for these.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from tgi_server.engine.backends import PagedModel, PassInput
from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, KVShape
from tgi_server.engine.checkpoint.quantized.layer import plain_linear
from tgi_server.engine.checkpoint.reader import read_tensors
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel


class EagleModel(nn.Module):
    """The layer's weights and what it carries; its tokens are those behind the ones whose features it gets.

    config: of the layer. features: [tokens, fc's inputs]; of those tokens of the next pass that do not decode, or None
    for zeros. carried: [rows, hidden_size]; what the layer has made of each row, which is its input in the next pass.
    """

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, Tensor], embedding: nn.Module, head: nn.Module
    ) -> None:
        """weights: of the layer, by the names of vLLM. embedding, head: of the model, for heads without their own.

        Raises InvalidWeights when one is missing.
        """
        super().__init__()
        self.config = config
        self._weights = weights
        attention, mlp = "layers.0.self_attn", "layers.0.mlp"
        self.fc = self._linear("fc")
        self.query, self.key, self.value, self.output = (
            self._linear(f"{attention}.{name}_proj") for name in ("q", "k", "v", "o")
        )
        self.gate, self.up, self.down = (self._linear(f"{mlp}.{name}_proj") for name in ("gate", "up", "down"))
        self.token_norm = self._norm("layers.0.input_layernorm")
        self.hidden_norm = self._norm("layers.0.hidden_norm")
        self.feed_forward_norm = self._norm("layers.0.post_attention_layernorm")
        self.norm = self._norm("norm")
        own = weights.get("embed_tokens.weight")
        self.embedding = embedding if own is None else nn.Embedding.from_pretrained(own)
        self.head = self._linear("lm_head") if "lm_head.weight" in weights else head
        self.rotary = LlamaRotaryEmbedding(config).to(self.fc.weight.device)
        self.activation = ACT2FN[config.hidden_act]
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.variant = AttentionVariant(scaling=self.head_dim**-0.5)
        self.norm_is_residual = bool(getattr(config, "norm_before_residual", False))
        self.features: Tensor | None = None
        self.carried = self.norm.weight.new_zeros(0, config.hidden_size)
        del self._weights

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(heads=(self.config.num_key_value_heads,), head_dim=self.head_dim)

    def hold(self, rows: int) -> None:
        """Allocates the hidden states that rows carry from one pass to the next."""
        self.carried = self.carried.new_zeros(rows, self.config.hidden_size)

    def forward(self, inputs: PassInput, attention: AttentionBackend) -> Tensor:
        """Returns logits of the drafter's vocabulary, [rows, vocab_size]."""
        tokens = self.token_norm(self.embedding(inputs.tokens))
        hidden = self._inputs(len(tokens), inputs.metadata.decoding)
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_is_residual else hidden
        rotation = self.rotary(tokens[None], position_ids=inputs.positions[None])
        residual = residual + self._attend(torch.cat([tokens, normed], -1), rotation, inputs, attention)
        widened = self.feed_forward_norm(residual)
        residual = residual + self.down(self.activation(self.gate(widened)) * self.up(widened))
        if inputs.wanted is not None:
            residual = residual[inputs.wanted]
        rows = min(len(residual), len(self.carried))
        self.carried[:rows] = residual[:rows]
        logits: Tensor = self.head(self.norm(residual))
        return logits

    def _inputs(self, tokens: int, decoding: int) -> Tensor:
        """Returns what the rows that decode carry, and then features: [tokens, hidden_size]."""
        if decoding == tokens:
            return self.carried[:decoding]
        features, self.features = self.features, None
        if features is None:
            features = self.carried.new_zeros(tokens - decoding, self.fc.in_features)
        return torch.cat([self.carried[:decoding], self.fc(features)])

    def _attend(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], inputs: PassInput, attention: AttentionBackend
    ) -> Tensor:
        query, key, value = (
            projection(x).view(len(x), -1, self.head_dim) for projection in (self.query, self.key, self.value)
        )
        query = attention.rotate_and_write(0, query, key, value, rotation, inputs.metadata)
        attended: Tensor = self.output(attention.attend(0, query, inputs.metadata, self.variant).flatten(1))
        return attended

    def _linear(self, name: str) -> nn.Linear:
        return plain_linear(self._weight(f"{name}.weight"), self._weights.get(f"{name}.bias"))

    def _norm(self, name: str) -> LlamaRMSNorm:
        norm = LlamaRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        norm.weight = nn.Parameter(self._weight(f"{name}.weight"), requires_grad=False)
        return norm

    def _weight(self, name: str) -> Tensor:
        if name not in self._weights:
            raise InvalidWeights(f"EAGLE-3's weights have no {name!r}; they have {', '.join(sorted(self._weights))}")
        return self._weights[name]


class PagedEagle(PagedModel):
    """The network over KV blocks of its own."""

    source: EagleModel

    def forward(self, inputs: PassInput) -> Tensor:
        logits: Tensor = self.source(inputs, self.attention)
        return logits


def read_eagle(folder: Path, model: PreTrainedModel) -> tuple[EagleModel, Tensor | None]:
    """Returns the network in a folder of the format that vLLM and SGLang load, and the ids of its tokens.

    The ids are [drafter's vocabulary] int64, or None where it has the model's own. Raises InvalidWeights or
    UnsupportedModel.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not isinstance(config, LlamaConfig) or config.num_hidden_layers != 1:
        raise UnsupportedModel(
            f"{folder} has {config.num_hidden_layers} layers of the kind {config.model_type}; for EAGLE-3 only one "
            "Llama layer is supported"
        )
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= read_tensors(file)
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    own = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): weight.to(model.device, model.dtype)
        for name, weight in weights.items()
    }
    eagle = EagleModel(config, own, model.get_input_embeddings(), model.get_output_embeddings())
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    if eagle.fc.in_features != 3 * hidden_size:
        raise UnsupportedModel(
            f"{folder} is for a model with a hidden size of {eagle.fc.in_features // 3}, but the model has "
            f"{hidden_size}; name the model that it was made for"
        )
    if offsets is None:
        return eagle, None
    return eagle, (torch.arange(len(offsets)) + offsets).to(model.device, torch.int64)
