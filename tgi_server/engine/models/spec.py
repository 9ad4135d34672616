"""A decoder as data: its parts, and the names of its modules in `transformers`.

Scaling, window, soft cap and sinks are not here: `transformers`' layers pass them when they call attention, and the
probe records them. Only layers that do not call attention through `AttentionInterface` have them in their spec.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from tgi_server.engine.parallel.plan import ShardingPlan

# "relu2" is the square of ReLU, "gelu_tanh" an approximation of GELU.
Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"]
TwoWay = Literal["all", "windows", ""]

# Names of activations in config.json.
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Names of the number of positions in configurations.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


class NoSpec(Exception):
    """Raised for a model without a spec, with the reason; `transformers`' own forward computes it."""


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A mixture of experts, of which a router chooses some for each token.

    name: the module; empty if the layer itself holds experts and router. router: its name in the module.
    chosen: experts of a token; None: `top_k` of the router. wide: the router computes in float32.
    router_scale: a tensor that the router's input is multiplied by, after it is divided by the root of its size.
    sigmoid: the score of an expert is the sigmoid of its logit; otherwise the softmax over all logits.
    bias: a tensor of the module that is added to scores for the choice only.
    groups, chosen_groups, group_scores: experts form groups of equal size; only those of the `chosen_groups` best
    groups may be chosen, and a group is judged by the sum of its `group_scores` highest scores.
    normalised: the weights of a token's experts sum to 1; otherwise they are the scores. factor: weights are multiplied
    by it afterwards. factors: a tensor with one for each expert. share_inputs: weights multiply the inputs of experts,
    not their outputs.
    """

    name: str = "mlp"
    router: str = "gate"
    chosen: int | None = None
    wide: bool = False
    router_scale: str | None = None
    sigmoid: bool = False
    bias: str | None = None
    groups: int = 1
    chosen_groups: int = 1
    group_scores: int = 1
    normalised: bool = True
    factor: float = 1.0
    factors: str | None = None
    share_inputs: bool = False

    @classmethod
    def deepseek(cls, config: Any, name: str = "mlp") -> Self:
        """Returns the mixture of DeepSeek-V3 (2024), which models of other families have, too."""
        return cls(
            name,
            wide=True,
            sigmoid=True,
            bias="gate.e_score_correction_bias",
            groups=config.n_group,
            chosen_groups=config.topk_group,
            group_scores=2,
            normalised=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
        )


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """An index, which chooses the tokens that a query attends to (DeepSeek-V3.2, 2025).

    tokens: number of chosen tokens. heads: number of heads of the index. interleaved: its rotary positions pair
    neighboring elements. shared: the layer has no index and attends to the tokens that the previous index chose.
    Modules: query computes the index's queries from the input of the layer's queries; key and norm compute one key for
    all heads; weights computes the weight of each head in the sum of scores.
    """

    tokens: int
    heads: int
    interleaved: bool = False
    shared: bool = False
    query: str = "self_attn.indexer.wq_b"
    key: str = "self_attn.indexer.wk"
    norm: str = "self_attn.indexer.k_norm"
    weights: str = "self_attn.indexer.weights_proj"


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """A module with recurrent states, such as a gated delta net.

    name: the module. kernel: its kernel. projections: the first linear layers, whose outputs the kernel reads
    concatenated. norm: norm of the kernel's output. output: the last linear layer. grouped: the projections' outputs
    are ordered by key head: its queries, keys, values and so on.
    """

    name: str
    kernel: Literal["gated_delta_net", "kimi_delta_attention", "mamba", "mamba2", "short_convolution"]
    projections: tuple[str, ...] = ("in_proj",)
    output: str = "out_proj"
    norm: str = "norm"
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer, by the names of its modules. The defaults are Llama's. A norm that is None does not exist.

    mixer: a module with states that replaces attention; the fields of attention then have no effect. beside: the layer
    has both, and adds both to the residual.

    Attention. attention: the module that knows the size of heads; None: the layer does not attend. qkv: projections
    that are computed as one; the checkpoint may store them as one, too. grouped: their outputs are ordered by KV head:
    its query heads, its key, its value. clip: bound of the absolute values of these outputs; 0: none. output: the last
    projection. query_norm, key_norm, value_norm: norms of each head, or of all heads together if their weights are that
    long; with latents, norms of the input of `query` and of the latents. scaling: factor of the scores, if
    `transformers` scales the query before it calls attention. value_scale: factor of the values. gated: the query's
    projection also computes a gate for each head, whose sigmoid multiplies the head's output.

    Latents (DeepSeek-V2, 2024). latents: the last of `qkv` computes latents and the rotated elements of keys. query:
    computes queries from the output of the first of `qkv`; None: that output is the queries. index: chooses the latents
    to attend to, if there is a `query`; None: all.

    Positions. rope: index of the rotary table; None: none. alibi: the bias by the position of the key (Press et al.,
    2022), with slopes as in BLOOM ("geometric"), rounded as in Falcon ("rounded"), or ordered as in MPT
    ("interleaved"). chunk: a token attends to its own chunk of so many tokens (Llama 4). window: a token attends to so
    many tokens, itself included, if `transformers` does not pass it in the call (GPT-Neo). tuning: floor and scale; the
    query at a position is multiplied by 1 + scale * log(1 + floor((position + 1) / floor)) (Nakanishi, 2025).

    Feed-forward. up: the projections that are computed as one, the gate's first if there is one; empty: the layer has
    none, or only a mixture. mixture: replaces `up` and `down`. shared: the layer has both; `up` and `down` are the
    expert of all tokens. shared_gate: a linear layer; the sigmoid of its output multiplies that expert's output.
    deviations: threshold of the gate's output (Gemma 3n): mean + deviations * standard deviation is subtracted, and
    negative results become 0.

    Norms. attention_norm, feed_forward_norm: norms of the inputs. attended_norm, fed_norm: norms of the outputs of
    attention and feed-forward before they are added to the residual. mixture_norm, router_norm: norms of the residual,
    which experts and router read instead of the input of `up`. mixed_norm, shared_norm: norms of the outputs of the
    mixture and of the shared expert. token_norm: norm of the token's embedding, which attention reads concatenated with
    the layer's input (EAGLE-3). normed_residual: the residual is the normalised input.

    Others. input_gate, input_projection, input_norm: the layer's further input (`LayerInputs`) is multiplied by the
    activated gate, projected, normalised, and added to the residual. output_scale: a tensor that multiplies the layer's
    output. scales: a factor for the outputs of linear layers, by their names, or a factor and the name of a tensor with
    a further factor for each output.
    """

    mixer: MixerSpec | None = None
    beside: bool = False
    attention: str | None = "self_attn"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    grouped: bool = False
    clip: float = 0.0
    latents: bool = False
    query: str | None = None
    index: IndexSpec | None = None
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mixture: MixtureSpec | None = None
    shared: bool = False
    shared_gate: str | None = None
    attention_norm: str | None = "input_layernorm"
    token_norm: str | None = None
    normed_residual: bool = False
    query_norm: str | None = None
    key_norm: str | None = None
    value_norm: str | None = None
    attended_norm: str | None = None
    feed_forward_norm: str | None = "post_attention_layernorm"
    fed_norm: str | None = None
    mixture_norm: str | None = None
    router_norm: str | None = None
    mixed_norm: str | None = None
    shared_norm: str | None = None
    input_gate: str | None = None
    input_projection: str | None = None
    input_norm: str | None = None
    output_scale: str | None = None
    deviations: float | None = None
    rope: int | None = 0
    alibi: Literal["geometric", "rounded", "interleaved"] | None = None
    chunk: int = 0
    window: int = 0
    value_scale: float = 1.0
    scaling: float | None = None
    tuning: tuple[float, float] | None = None
    gated: bool = False
    scales: Mapping[str, float | tuple[float, str]] = field(default_factory=dict)

    @property
    def attends(self) -> bool:
        """True if the layer has keys and values."""
        return self.attention is not None and (self.mixer is None or self.beside)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary tables of some layers.

    layer_type: the type of the layers, if the embedding of `transformers` has tables by type. table: the form of its
    output for a head: each number twice ("halves"), once ("half"), each beside itself ("pairs"), or once as a complex
    number ("complex"). rotated: elements of a head that are rotated (RoFormer, arXiv:2104.09864), if `transformers` has
    no such embedding.
    """

    layer_type: str | None = None
    table: Literal["halves", "half", "pairs", "complex"] = "halves"
    rotated: int | None = None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A further input of each layer (Gemma 3n): an embedding of its token and a projection of the first layer's input.

    embedding, projection: modules of the decoder; their outputs are those of all layers side by side. tokens: size of
    the embedding's vocabulary; other tokens have the input of token 0. norm: norm of each layer's slice of the
    projection. embedding_scale, projection_scale, scale: factors of the two, and of their sum.
    """

    tokens: int
    embedding_scale: float
    projection_scale: float
    scale: float
    embedding: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A model with a causal decoder: token embedding, layers, norm, head.

    activation: activation of the feed-forward part, or of its gate if `gated_mlp`. layer_list, final_norm, positions,
    embedding_norm, rotary: modules of the decoder: the list of layers, the norm after them, learned positions, the norm
    of embeddings, rotary positions. ropes: the rotary tables. interleaved: rotary positions pair neighboring elements
    of a head, not elements that are half of it apart.
    parallel: the feed-forward part reads the input of attention or, if there is a `feed_forward_norm`, the layer's
    input after that norm. residual_scale: multiplies what layers add. embedding_scale: multiplies embeddings, rounded
    to the model's dtype. logits_divisor, logits_softcap: divisor and soft cap of the logits; cap 0: none.
    inputs: further inputs of layers; None: none. altup: several streams of hidden states, with Gemma 3n's module names.
    """

    layers: tuple[LayerSpec, ...]
    activation: Activation = "silu"
    gated_mlp: bool = True
    layer_list: str = "layers"
    final_norm: str | None = "norm"
    positions: str | None = None
    embedding_norm: str | None = None
    rotary: str = "rotary_emb"
    ropes: tuple[RopeSpec, ...] = (RopeSpec(),)
    interleaved: bool = False
    altup: bool = False
    parallel: bool = False
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    inputs: LayerInputs | None = None
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0

    @property
    def has_states(self) -> bool:
        """True if there are layers with states."""
        return any(layer.mixer for layer in self.layers)

    @property
    def has_index(self) -> bool:
        """True if some layers attend to chosen tokens only."""
        return any(layer.index for layer in self.layers)

    @property
    def has_latents(self) -> bool:
        """True if there are layers that attend to latents."""
        return any(layer.latents for layer in self.layers)

    def rotary_in(self, rotary: Iterable[bool]) -> Self:
        """Returns the spec with rotary positions only in the layers that are True in `rotary`."""
        pairs = zip(self.layers, rotary, strict=True)
        return replace(self, layers=tuple(layer if turned else replace(layer, rope=None) for layer, turned in pairs))

    def rotary_by_type(self, layer_types: Sequence[str]) -> Self:
        """Returns the spec with rotary tables for each type of layer. layer_types: the type of each layer."""
        types = sorted(set(layer_types))
        kinds = zip(self.layers, layer_types, strict=True)
        layers = tuple(replace(layer, rope=types.index(kind)) for layer, kind in kinds)
        return replace(self, layers=layers, ropes=tuple(RopeSpec(kind) for kind in types))

    @classmethod
    def uniform(cls, config: Any, layer: LayerSpec | None = None, **facts: Any) -> Self:
        """Returns the spec of a model whose layers are alike. facts: further fields of the spec."""
        return cls((layer or LayerSpec(),) * config.num_hidden_layers, **facts)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, by its `model_type`: functions of the configuration, and facts.

    spec: raises NoSpec for a model that it does not describe; None: the family has no spec.
    plan: returns the sharding plan; None: the model cannot be split among ranks.
    relative: positions are relative, so nothing bounds the length of a text.
    mtp: checkpoints may have a layer that predicts further tokens (DeepSeek-V3, 2024).
    padding_first: positions are counted from the id of the padding token plus one, as in RoBERTa.

    Of models that contain a text model. images: it reads images. two_way: returns the layers in which the tokens of an
    image attend to each other: "all", those with a window ("windows"), or none (""). image_projector: the module that
    makes features from the output of `get_image_features`; None: that output is the features. text_alone: the class of
    `transformers` needs a library for images (timm), so the text model is built alone.
    """

    spec: Callable[[Any], DecoderSpec] | None = None
    plan: Callable[[Any], ShardingPlan] | None = None
    relative: bool = False
    mtp: bool = False
    padding_first: bool = False
    images: bool = False
    two_way: Callable[[Any], TwoWay] = lambda _: ""
    image_projector: str | None = None
    text_alone: bool = False

    def positions(self, config: Any) -> int | None:
        """Returns the number of positions that a model of this text configuration has; None: unlimited.

        Rotary positions that are scaled by a factor (YaRN: Peng et al., 2023) reach as far as that factor says.
        """
        if self.relative or getattr(config, "alibi", False):
            return None
        rope = getattr(config, "rope_parameters", None) or {}
        scaled = int((rope.get("factor") or 0) * (rope.get("original_max_position_embeddings") or 0))
        for name in _POSITIONS:
            if value := getattr(config, name, None):
                padding = (config.pad_token_id or 0) + 1 if self.padding_first else 0
                return max(int(value), scaled) - padding
        return None


def activation(name: str) -> Activation:
    """Returns an activation by its name in config.json. Raises NoSpec."""
    if name not in _ACTIVATIONS:
        raise NoSpec(f"the activation {name} is not known")
    return _ACTIVATIONS[name]
