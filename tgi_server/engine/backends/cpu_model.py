"""Models of specs on CPUs: one kernel call, from the tokens of any pass to logits."""

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.attention.base import AttentionVariant, ForwardMetadata
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.backends.base import ImageTokens, Keep, MakeLora, PagedModel, PassInput, TopOnly
from tgi_server.engine.backends.decoder import (
    AltUpLayer,
    AttentionHeads,
    Decoder,
    DecoderInputs,
    DecoderLayer,
    Norm,
    inner,
)
from tgi_server.engine.backends.head import PrefilteredHead
from tgi_server.engine.backends.lora import AdaptedLinear, CpuLora
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedEmbedding
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import structure
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.group import peers
from tgi_server.engine.parallel.layers import RowParallel, VocabParallelEmbedding, VocabParallelHead

# The linear layer that the kernel has in `Latents`, not beside the others.
_OF_LATENTS = "query"


class CpuModel(PagedModel):
    """A decoder that computes every kind of pass in one kernel call."""

    name = "one kernel call"
    attention: CpuAttention

    def __init__(
        self, source: nn.Module, decoder: Decoder, attention: CpuAttention, group: ShardGroup | None = None
    ) -> None:
        """group: the shards of the model, when this is one of them. Raises UnsupportedModel for parts without a
        kernel.
        """
        super().__init__(source, attention)
        self.decoder = decoder
        self._group = group
        self._kernel = _kernel(decoder)
        self._like = decoder.embedding_weight
        self._rows_with_adapters = torch.empty(0, dtype=torch.int32)
        self._keep: Keep | None = None
        self.states = SequenceStates() if decoder.spec.has_states else None
        self._attached = -1  # the generation of the states that the kernel has
        self._faults = nullcontext if group is None else peers
        if group is not None:
            self._kernel.split(group.ranks(), cast(VocabParallelHead, decoder.head).vocab_size)

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets copies build new kernels, because kernels cannot be pickled."""
        return type(self), (self.source, self.decoder, self.attention, self._group), {"kv_shape": self.kv_shape}

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        backend = self.attention
        self._kernel.attach_cache(backend.keys, backend.values, backend.key_scales, backend.value_scales)

    def attach_rows(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        adapters: Tensor,
        rope_deltas: Tensor,
        state_slots: Tensor,
    ) -> None:
        self._rows_with_adapters = adapters
        rows = tokens, positions, tables, adapters, rope_deltas, state_slots
        self._kernel.attach_rows(*rows, self.attention.block_size)

    def tap(self, layers: Sequence[int], keep: Keep) -> None:
        self._keep = keep
        self._kernel.tap(list(layers))

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        self.adapted = True
        adapted = []
        for linear, parts in self.decoder.adaptable():
            backend = cast(CpuLora, lora(linear.out_features, len(parts)))
            linear.kernel().adapt(backend.kernel)
            adapted.append(AdaptedLinear(parts, linear.in_features, backend))
        return adapted

    def decode(self, rows: int, longest: int, top: TopOnly | None, *, adapted: bool) -> tuple[Tensor, Tensor | None]:
        """See the interface. The argmax is None if more of the logits is needed, or if a row has a mask."""
        mask = top.mask if top else None
        self._attach_states()
        tables = self._tables(longest)
        with self._faults():
            count = top.count if top else 0
            logits, argmax_ids, taps = self._kernel.decode(rows, *tables, adapted, count, mask is None)
        adapters = self._rows_with_adapters[:rows] if adapted else None
        return self._finished(logits, taps, adapters, top), argmax_ids

    def forward(self, inputs: PassInput) -> Tensor:
        """Returns logits. It is fastest if the wanted tokens are each sequence's last ones, in order."""
        metadata, adapters = inputs.metadata, inputs.adapters.numbers if inputs.adapters else None
        top = inputs.top
        turns = inputs.positions if inputs.rotary is None else inputs.rotary
        if turns.dim() == 1:
            cosines, sines = self._tables(metadata.max_kv_length)
        else:
            (cosines, sines), turns = self._turns(metadata.max_kv_length, turns), torch.arange(len(inputs.tokens))
        runs, saves, drafted = self._states_of(metadata)
        given = structure(
            "PassInput",
            tokens=inputs.tokens,
            positions=turns,
            slots=metadata.slots,
            tables=metadata.block_tables,
            kv_lengths=metadata.kv_lengths,
            query_starts=metadata.query_starts,
            cos=cosines,
            sin=sines,
            wanted=inputs.wanted,
            adapters=adapters,
            top=top.count if top else 0,
            head=top is None or top.mask is None,
            ends=metadata.ends,
            ends_in_windows=metadata.ends_in_windows,
            runs=runs,
            saves=saves,
            drafted=drafted,
            **({} if inputs.images is None else _images(inputs.images)),
        )
        with self._faults():
            logits, taps = self._kernel.forward(given)
        if adapters is not None and inputs.wanted is not None:
            adapters = adapters[inputs.wanted]
        return self._finished(logits, taps, adapters, top)

    def _attach_states(self) -> None:
        """Gives the kernel the states of all slots, if their tensors have been replaced."""
        states = self.states
        if states is None or self._attached == states.generation:
            return
        mixers = [layer.mixer for layer in self.decoder.layers]
        self._kernel.attach_states([mixer.states(states, self._like.dtype) if mixer else [] for mixer in mixers])
        self._attached = states.generation

    def _states_of(self, metadata: ForwardMetadata) -> tuple[Tensor | None, Tensor | None, bool]:
        """Returns which tokens of a pass read and write which states, and True if some of them are drafted."""
        states = self.states
        if states is None:
            return None, None, False
        self._attach_states()
        runs, saves = _runs(metadata, states)
        drafted = [
            (chunk, slot)
            for chunk, slot in zip(metadata.chunks, metadata.state_slots[metadata.decoding :], strict=True)
            if chunk.drafted
        ]
        for chunk, slot in drafted:
            states.draft(slot, partial(self._kernel.advance, slot, chunk.start))
        return runs, saves, bool(drafted)

    def _finished(self, output: Tensor, taps: list[Tensor], adapters: Tensor | None, top: TopOnly | None) -> Tensor:
        """Returns logits. output: those, or the head's input where there are masks, which may not be ready yet."""
        if self._keep is not None:
            self._keep(taps)
        if top is None or top.mask is None:
            return output
        mask = top.mask.wait()
        with self._faults():
            logits: Tensor = self._kernel.logits(output, adapters, top.count, mask.bits, list(mask.positions))
        return logits

    def _tables(self, length: int) -> tuple[list[Tensor], list[Tensor]]:
        tables = [kind.tables(self._like, length) for kind in self.decoder.ropes]
        return [cosines for cosines, _ in tables], [sines for _, sines in tables]

    def _turns(self, length: int, positions: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the rows of the tables for positions of time, height and width: [3, tokens]."""
        tables = [kind.gathered(self._like, length, positions) for kind in self.decoder.ropes]
        return [cosines for cosines, _ in tables], [sines for _, sines in tables]


def _images(images: ImageTokens) -> dict[str, Any]:
    """Returns members of the kernel's PassInput."""
    return {"image_rows": images.rows, "image_embeddings": images.embeddings, "images_added": list(images.added)}


def _runs(metadata: ForwardMetadata, states: SequenceStates) -> tuple[Tensor, Tensor]:
    """Returns the runs of neighbouring tokens of the same text in a pass, [runs, 4] int64, and saves, [saves, 3] int64.

    A run is its first token, number of tokens, slot, and 1 if the slot gets the state after them. A save copies the
    state within a run: the run, the number of its tokens before the copy, and the slot of the copy.
    """
    rows, saves = metadata.decoding, []
    runs = [(row, 1, slot, 1) for row, slot in enumerate(metadata.state_slots[:rows])]
    for chunk, slot in zip(metadata.chunks, metadata.state_slots[rows:], strict=True):
        saves += [(len(runs), tokens, states.slot_of(snapshot)) for tokens, snapshot in chunk.saves]
        runs.append((chunk.start, chunk.length, slot, int(not chunk.drafted)))
    return torch.tensor(runs), torch.tensor(saves, dtype=torch.int64).view(-1, 3)


def _kernel(decoder: Decoder) -> Any:
    """Returns a `torch.classes.oatmill.CausalLM`. Raises UnsupportedModel."""
    spec, head, weight = decoder.spec, inner(decoder.head), decoder.embedding_weight
    prefilter = None
    if isinstance(head, PrefilteredHead):
        prefilter = structure("Prefilter", **head.prefilter, weight=weight if head.tied else None)
    modules = structure(
        "ModelModules",
        decoder=_layers_kernel(decoder),
        embedding=_embedding_kernel(decoder.embedding, spec.embedding_scale),
        positions=decoder.positions,
        embedding_norm=_norm_kernel(decoder.embedding_norm),
        inputs=None if decoder.inputs is None else _inputs_kernel(decoder.inputs),
        norm=_norm_kernel(decoder.norm),
        head=_linear_kernel(head),
        logits_divisor=spec.logits_divisor,
        logits_softcap=spec.logits_softcap,
        prefilter=prefilter,
    )
    return torch.classes.oatmill.CausalLM(modules)


def _embedding_kernel(embedding: Any, scale: float) -> Any:
    """Returns a `torch.classes.oatmill.Embedding`. scale: factor of its rows, which is rounded to their dtype."""
    own = embedding.inner if isinstance(embedding, VocabParallelEmbedding) else embedding
    layer = _linear_kernel(own.layer) if isinstance(own, QuantizedEmbedding) else None
    return torch.classes.oatmill.Embedding(own.weight, layer, float(torch.tensor(scale, dtype=own.weight.dtype)))


def _inputs_kernel(inputs: DecoderInputs) -> Any:
    spec = inputs.spec
    embedding, projection = _embedding_kernel(inputs.embedding, spec.embedding_scale), _linear_kernel(inputs.projection)
    return torch.classes.oatmill.LayerInputs(
        embedding, spec.tokens, projection, _norm_kernel(inputs.norm), spec.projection_scale, spec.scale
    )


def _layers_kernel(decoder: Decoder) -> Any:
    """Returns a `torch.classes.oatmill.Decoder`."""
    spec = decoder.spec
    kernel = torch.classes.oatmill.Decoder(
        spec.activation, spec.gated_mlp, spec.parallel, spec.residual_scale, spec.interleaved, _streams_kernel(decoder)
    )
    for layer in decoder.layers:
        if layer.spec.index or layer.spec.token_norm:
            raise UnsupportedModel(f"layer {layer.index} has an index of tokens, or reads their embeddings")
        norms = {name: _norm_kernel(norm) for name, norm in layer.norms.items()}
        linears = {name: _linear_kernel(linear) for name, linear in layer.linears.items() if name != _OF_LATENTS}
        attention = _attention_kernel(layer, layer.heads, layer.variant) if layer.heads and layer.variant else None
        mixer = layer.mixer.kernel() if layer.mixer else None
        mixture = _mixture_kernel(layer) if layer.mixture is not None else None
        altup = _altup_kernel(layer.altup) if layer.altup else None
        output, down = map(layer.linears.get, ("output", "down"))
        whole = isinstance(output, RowParallel) and isinstance(down, PackedLinear) and mixture is None
        modules = structure(
            "LayerModules",
            norms=norms,
            linears=linears,
            scales=layer.scales,
            attention=attention,
            mixer=mixer,
            mixture=mixture,
            altup=altup,
            scale=layer.scale,
            deviations=layer.spec.deviations,
            whole=whole,
        )
        kernel.add_layer(modules)
    return kernel


def _streams_kernel(decoder: Decoder) -> Any:
    if decoder.streams is None:
        return None
    return torch.classes.oatmill.Streams(
        *([_linear_kernel(linear) for linear in linears] for linears in decoder.streams)
    )


def _altup_kernel(altup: AltUpLayer) -> Any:
    router, prediction, correction, left, right = map(_linear_kernel, altup.linears.values())
    norm, laurel_norm = _norm_kernel(altup.norm), _norm_kernel(altup.laurel_norm)
    return torch.classes.oatmill.AltUp(norm, router, prediction, correction, altup.scale, left, right, laurel_norm)


def _attention_kernel(layer: DecoderLayer, heads: AttentionHeads, variant: AttentionVariant) -> Any:
    spec, latents = layer.spec, None
    if layer.latents is not None:
        of_heads = ([_linear_kernel(each) for each in part] for part in (layer.latents.keys, layer.latents.values))
        query = _linear_kernel(layer.linears[_OF_LATENTS]) if _OF_LATENTS in layer.linears else None
        rotated = layer.latents.rotated
        latents = torch.classes.oatmill.Latents(heads.size - rotated, rotated, query, *of_heads)
    return structure(
        "Attention",
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.size,
        value_dim=heads.value_size,
        value_scale=spec.value_scale,
        latents=latents,
        scaling=variant.scaling,
        softcap=variant.softcap,
        window=variant.window,
        chunk=variant.chunk,
        sinks=variant.sinks,
        alibi_slopes=variant.alibi_slopes,
        rounded_alibi=variant.rounded_alibi,
        rotation=spec.rope,
        gated=spec.gated,
        grouped=spec.grouped,
        clip=spec.clip,
        keys_of=variant.source(layer.index),
        tuning=spec.tuning,
    )


def _mixture_kernel(layer: DecoderLayer) -> Any:
    mixture, spec = layer.mixture, layer.spec.mixture
    assert spec is not None
    router, experts = operator.attrgetter(spec.router)(mixture), inner(mixture.experts)
    kernel = experts.kernel() if isinstance(experts, Experts) else None
    packed = isinstance(router, PackedLinear)
    if kernel is None or not (packed or FloatLinear.supports(router.weight.dtype)):
        raise UnsupportedModel(
            f"layer {layer.index} has experts for which there is no kernel; start with --disable-custom-kernels"
        )
    bias, factors = (
        None if name is None else operator.attrgetter(name)(mixture).float() for name in (spec.bias, spec.factors)
    )
    routing = structure(
        "Routing",
        chosen=spec.chosen or router.top_k,
        sigmoid=spec.sigmoid,
        bias=bias,
        groups=spec.groups,
        chosen_groups=spec.chosen_groups,
        group_scores=spec.group_scores,
        normalised=spec.normalised,
        factor=spec.factor,
        wide=spec.wide,
        factors=factors,
        share_inputs=spec.share_inputs,
    )
    linear = (router if packed else FloatLinear(router.weight, getattr(router, "bias", None))).kernel()
    return torch.classes.oatmill.Mixture(linear, kernel, routing)


def _norm_kernel(norm: Norm | None) -> Any:
    if norm is None:
        return None
    whole_size, copies = (0, 1) if norm.sharded is None else (norm.sharded.whole_size, norm.sharded.copies)
    return torch.classes.oatmill.Norm(norm.weight, norm.bias, norm.eps, norm.centred, whole_size, copies)


def _linear_kernel(layer: Any) -> Any:
    """Returns a `torch.classes.oatmill.Linear`, also of a row-parallel layer: the kernel sums what shards compute."""
    linear = inner(layer)
    kernel = linear.kernel() if isinstance(linear, PackedLinear) else None
    if kernel is None:
        raise UnsupportedModel("a linear layer has no kernel; start with --disable-custom-kernels")
    return kernel
