"""A decoder as data: what it is made of, and the names that its modules have in `transformers`.

What the layers of `transformers` say when they call attention (scaling, window, soft cap, sinks) does not stand here:
the probe notes it. Layers that do not call attention through `AttentionInterface` have it in their spec.
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
# Names that configurations have for the number of positions.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


class NoSpec(Exception):
    """A model has no spec, for the given reason; `transformers`' own forward computes it."""


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A mixture of experts: a module of that name, with `experts` and a router that chooses some of them for a token.

    name: empty where the layer itself has them. router: its name in the module. chosen: the number of a token's
    experts; None: the router has it, as `top_k`. wide: the router computes in float32. router_scale: a tensor by which
    the router's input is multiplied, and divided by the root of its size; None: there is none.
    sigmoid: an expert's score is the sigmoid of its own output of the router, not its part of the softmax over all.
    bias: what is added to scores in the choice alone, by its name in the module; None: nothing. groups: of the experts,
    of equal size; a token has those of the `chosen_groups` best ones alone, by the sum of the `group_scores` highest
    scores in each. normalised: the shares of a token's experts add up to 1, and are otherwise their scores. factor: by
    which shares are multiplied then. factors: a tensor with the same for each expert. share_inputs: shares multiply
    what goes into experts, not what comes out.
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
    """An index, which chooses the tokens that a query attends to (DeepSeek-V3.2, 2025), by the names of its modules.

    tokens: how many are chosen. heads: of its queries. query: makes these of what the layer makes its own queries of.
    key, norm: of a token, once for all heads. weights: of the heads in the sum of their scores. interleaved: rotary
    positions pair neighbouring elements. shared: the layer has no index, but attends to what the last one chose.
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
    """A module with states, such as a gated delta net: the kernel that computes it, and the names of its modules.

    name: in the layer. projections: the first linear layers, whose outputs stand side by side for the kernel. output:
    the last one. norm: of what the kernel gives. grouped: the outputs of the projections are, for each key head, its
    queries, keys, values and so on.
    """

    name: str
    kernel: Literal["gated_delta_net", "kimi_delta_attention", "mamba", "mamba2", "short_convolution"]
    projections: tuple[str, ...] = ("in_proj",)
    output: str = "out_proj"
    norm: str = "norm"
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer, by the names of its modules. A norm that is None does not exist.

    mixer: a module with states in the place of attention; then what says how a layer attends says nothing. None: the
    layer attends. beside: it does both, and adds both to the residual.
    attention: the module that says the size of heads; None: the layer does not attend. qkv: the projections that are
    computed as one; they may be one in the checkpoint, too. grouped: their outputs are, for each KV head, its query
    heads, its key and its value. clip: no output of theirs is further from 0; 0: nothing is clipped.
    latents: attention is over latents (DeepSeek-V2, 2024): the last of `qkv` makes these and the turned elements of
    keys. query: makes queries of what the first of `qkv` gives; None: that gives them.
    token_norm: attention reads, in front of the layer's input, the embedding of the token by this norm (EAGLE-3).
    normed_residual: what the layer adds is added to its normalised input.
    query_norm, key_norm, value_norm: of each head, or of all together, as their weights say; with latents, of what
    `query` takes, and of latents.
    index: of the latents attended to, where there is a `query`; None: all are.
    attended_norm, fed_norm: of what attention and the feed-forward part add to the residual.
    up: the gate's projection first, where there is a gate; none: there is no feed-forward part but the mixture, if any.
    mixture: in the place of `up` and `down`.
    shared: beside the mixture, `up` and `down` are those of an expert that all tokens have. shared_gate: a linear layer
    whose output, by its sigmoid, is a gate of that expert's. mixed_norm, shared_norm: of what the mixture and that
    expert give. mixture_norm, router_norm: of the layer's residual, which experts and router then read in place of what
    `up` does.
    input_gate, input_projection, input_norm: the layer has a further input (`LayerInputs`), multiplied by the gate's
    activation; the normalised projection of that is added to the residual. output_scale: a tensor with the number by
    which the layer's output is multiplied. deviations: of what the gate gives, only the excess over the mean and so
    many standard deviations counts (Gemma 3n); None: all.
    rope: which of the model's rotary tables turns queries and keys; None: none does. alibi: what is added to scores by
    the position of the key (Press et al. 2022), with slopes as in BLOOM ("geometric"), rounded as in Falcon
    ("rounded"), or ordered as in MPT ("interleaved"); None: nothing. chunk: a token attends to those of its own chunk
    of so many tokens (Llama 4); 0: there are no chunks. window: a token attends to so many tokens, itself included,
    where `transformers` does not say it in the call (GPT-Neo); 0: as it says there.
    value_scale: of values. scaling: of the scores, where `transformers` scales the query before it calls attention;
    None: as it says there. tuning: a floor and a scale, of the query at each position: it is multiplied by
    1 + scale * log(1 + floor((position + 1) / floor)) (Nakanishi 2025).
    gated: the query's projection gives a gate beside each head's query; the head's output is multiplied by its sigmoid.
    scales: what the outputs of linear layers are multiplied by, by their names: a number, or one and the name of a
    tensor with a further one for each output.
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

    layer_type: that of the layers, where the embedding of `transformers` has tables of several types. table: what that
    returns for a head: its numbers twice ("halves"), once ("half"), each beside itself ("pairs"), or once as complex
    numbers ("complex"). rotated: the
    elements of a head that are turned, as in RoFormer (arXiv:2104.09864), where `transformers` has no such embedding.
    """

    layer_type: str | None = None
    table: Literal["halves", "half", "pairs", "complex"] = "halves"
    rotated: int | None = None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A further input of each layer (Gemma 3n): of its token, by an embedding, and of what the first layer gets.

    embedding, projection: modules of the decoder, whose outputs are those for all layers side by side. tokens: that the
    embedding has; others have the input of the first one. norm: of each layer's part of the projection.
    embedding_scale, projection_scale, scale: of the two, and of their sum.
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

    activation: of the feed-forward part, or of its gate, if it is gated.
    layer_list, final_norm, positions, embedding_norm, rotary: modules of the decoder: the list of layers, the norm
    after them, learned positions, the norm of embeddings, and rotary positions.
    interleaved: rotary embeddings turn neighbouring elements of a head, not those half of it apart.
    parallel: the feed-forward part has the input of attention; or, where there is a `feed_forward_norm`, the layer's
    input, normalised by that. residual_scale: what layers add is multiplied by it.
    embedding_scale: the same of embeddings, as the model's dtype has it. inputs: of layers; None: they have no further
    ones. logits_divisor, logits_softcap: what logits are divided by; and capped by, 0 for not at all.
    altup: there are several streams of hidden states, as in Gemma 3n, by the names of modules there.
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
        """True if there are layers that attend to chosen tokens alone."""
        return any(layer.index for layer in self.layers)

    @property
    def has_latents(self) -> bool:
        """True if there are layers that attend to latents."""
        return any(layer.latents for layer in self.layers)

    def rotary_in(self, rotary: Iterable[bool]) -> Self:
        """Returns the spec with rotary positions in those layers alone for which there is a True."""
        pairs = zip(self.layers, rotary, strict=True)
        return replace(self, layers=tuple(layer if turned else replace(layer, rope=None) for layer, turned in pairs))

    def rotary_by_type(self, layer_types: Sequence[str]) -> Self:
        """Returns the spec with rotary tables for each type of layers. layer_types: of each layer."""
        types = sorted(set(layer_types))
        kinds = zip(self.layers, layer_types, strict=True)
        layers = tuple(replace(layer, rope=types.index(kind)) for layer, kind in kinds)
        return replace(self, layers=layers, ropes=tuple(RopeSpec(kind) for kind in types))

    @classmethod
    def uniform(cls, config: Any, layer: LayerSpec | None = None, **facts: Any) -> Self:
        """Returns the spec of a model whose layers are alike. facts: what else differs from the defaults."""
        return cls((layer or LayerSpec(),) * config.num_hidden_layers, **facts)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, by its `model_type`: functions of the configuration, and facts.

    spec: raises NoSpec for a model that it does not describe; None: the family has no spec.
    plan: how the model is split among ranks; None: it cannot be split.
    relative: positions are relative, so that nothing bounds the length of a text.
    mtp: checkpoints may have a layer that predicts further tokens (DeepSeek-V3, 2024).
    padding_first: positions are counted from the one behind the padding token's id, as in RoBERTa.
    Of a model with a text model in it: images: it reads images. two_way: returns the layers in which an image's tokens
    attend to each other: "all", those with a window ("windows"), or none (""). image_projector: the module that makes
    features of what `get_image_features` returns; None: these are the features. text_alone: the class of `transformers`
    needs a library for images (timm), so that the text model is built alone.
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
        """Returns the most positions that a model of this text configuration has; None: nothing bounds them.

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
