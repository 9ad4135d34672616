"""Models on CPUs: one kernel call, from the tokens of any pass to logits."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.base import ForwardMetadata, GreedyOnly
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.backends.head import ScreenedHead
from tgi_server.engine.backends.layer import NORMS, DecoderLayer, linear_kernel
from tgi_server.engine.backends.norm import Norm
from tgi_server.engine.backends.rope import RotaryTable
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.models.spec import DecoderSpec
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.group import peers
from tgi_server.engine.parallel.layers import VocabParallelEmbedding, VocabParallelHead


class CpuModel:
    """A model of a spec in one kernel call, whatever a pass brings."""

    def __init__(
        self,
        kernel: Any,
        rotary: Sequence[RotaryTable],
        like: Tensor,
        faults: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """kernel: a `torch.classes.oatmill.CausalLM`. rotary, like: what makes rotary tables, of each kind.

        faults: turns what the kernel raises into errors of the engine.
        """
        self._kernel = kernel
        self._rotary = rotary
        self._like = like
        self._adapters = torch.empty(0, dtype=torch.int32)
        self._keep: Callable[[list[Tensor]], None] | None = None
        self._faults = faults

    @classmethod
    def of(cls, model: PreTrainedModel, spec: DecoderSpec, layers: Any, group: ShardGroup | None = None) -> Self | None:
        """Returns the model around its layers, a `torch.classes.oatmill.Decoder`; None where the kernel cannot take it.

        model: what holds the weights of the rest. group: the shards of the model, when this is one of them.
        """
        decoder: Any = model.get_decoder()
        head: Any = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings()
        vocab_size = 0
        if isinstance(head, VocabParallelHead) and isinstance(embedding, VocabParallelEmbedding):
            vocab_size, head, embedding = head.vocab_size, head.inner, embedding.inner
        linear = head.kernel() if isinstance(head, PackedLinear) else None
        if linear is None or not isinstance(embedding, nn.Embedding):
            return None
        weight = embedding.weight
        places = decoder.get_submodule(spec.positions) if spec.positions else None
        norm = Norm.of(decoder.get_submodule(spec.final_norm), spec.norms) if spec.final_norm else None
        screen, screened_rows = head.screen if isinstance(head, ScreenedHead) else ([], 0)
        kernel = torch.classes.oatmill.CausalLM(
            layers,
            weight,
            float(torch.tensor(spec.embedding_scale, dtype=weight.dtype)),
            None if places is None else places.weight[getattr(places, "offset", 0) :],
            None if norm is None else norm.kernel(),
            linear,
            spec.logits_divisor,
            spec.logits_softcap,
            screen,
            screened_rows,
        )
        if group is not None:
            kernel.split(group.memory, vocab_size)
        rotary = [RotaryTable(decoder.rotary_emb, each) for each in spec.ropes]
        return cls(kernel, rotary, weight, nullcontext if group is None else peers)

    def attach_cache(self, backend: CpuAttention) -> None:
        """Takes the backend's KV blocks, which all later passes read and write."""
        self._kernel.attach_cache(backend.keys, backend.values, backend.key_scales, backend.value_scales)

    def attach_rows(self, tokens: Tensor, positions: Tensor, tables: Tensor, adapters: Tensor, block_size: int) -> None:
        """Takes what `decode` reads and writes.

        tokens, positions: [rows] int64. tables: [rows, blocks] int32. adapters: [rows] int32.
        """
        self._adapters = adapters
        self._kernel.attach_rows(tokens, positions, tables, adapters, block_size)

    def tap(self, layers: Sequence[int], keep: Callable[[list[Tensor]], None]) -> None:
        """Has every pass call `keep` with the head's input, [rows, hidden_size], and the inputs of some layers.

        layers: their indices, in ascending order; the inputs are [tokens, hidden_size].
        """
        self._keep = keep
        self._kernel.tap(list(layers))

    def decode(
        self, rows: int, longest: int, greedy: GreedyOnly | None, *, adapted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits of the first rows, [rows, vocab_size], and the likeliest tokens, [rows] int64, or None.

        The rows' positions move on. Where greedy rows have no mask, the likeliest tokens are the next inputs of the
        rows, too. longest: at least the most tokens that any row has, this one included. adapted: a row has an adapter.
        """
        mask = greedy.mask if greedy else None
        tables = self._tables(longest)
        with self._faults():
            logits, likeliest, taps = self._kernel.decode(rows, *tables, adapted, greedy is not None, mask is None)
        adapters = self._adapters[:rows] if adapted else None
        return self._finished(logits, taps, adapters, greedy), likeliest

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor | None,
        metadata: ForwardMetadata,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Returns the logits of the wanted tokens, [rows, vocab_size].

        tokens, positions: [tokens] int64. wanted: [rows] int64, in order, each sequence's last ones; None: all.
        adapters: [tokens] int32, the number of each token's adapter; None: none has one.
        """
        greedy, tables = metadata.greedy, self._tables(metadata.max_kv_length)
        places = metadata.slots, metadata.block_tables, metadata.kv_lengths, metadata.query_starts
        head = greedy is None or greedy.mask is None
        with self._faults():
            logits, taps = self._kernel.forward(
                tokens, positions, *places, *tables, wanted, adapters, greedy is not None, head
            )
        if adapters is not None and wanted is not None:
            adapters = adapters[wanted]
        return self._finished(logits, taps, adapters, greedy)

    def _finished(
        self, output: Tensor, taps: list[Tensor], adapters: Tensor | None, greedy: GreedyOnly | None
    ) -> Tensor:
        """Returns logits. output: those, or the head's input where there are masks, which may not be ready yet."""
        if self._keep is not None:
            self._keep(taps)
        if greedy is None or greedy.mask is None:
            return output
        mask = greedy.mask.wait()
        with self._faults():
            logits: Tensor = self._kernel.logits(output, adapters, True, mask.bits, list(mask.positions))
        return logits

    def _tables(self, length: int) -> tuple[list[Tensor], list[Tensor]]:
        tables = [kind.tables(self._like, length) for kind in self._rotary]
        return [cosines for cosines, _ in tables], [sines for _, sines in tables]


def layers_kernel(spec: DecoderSpec, layers: Sequence[nn.Module]) -> Any:
    """Returns the layers of a model as a `torch.classes.oatmill.Decoder`; None where the kernel cannot take them.

    A layer that is still that of `transformers` is one that it cannot take.
    """
    known = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    if len(known) < len(layers):
        return None
    heads = known[0].heads
    kernel = torch.classes.oatmill.Decoder(
        heads.heads, heads.kv_heads, heads.size, spec.activation, spec.parallel, spec.residual_scale, spec.interleaved
    )
    return kernel if all(_add(kernel, layer) for layer in known) else None


def _add(kernel: Any, layer: DecoderLayer) -> bool:
    """Adds a layer. Returns False if the kernel does not know one of its linear layers."""
    qkv, output, feed_forward = linear_kernel(layer.qkv), linear_kernel(layer.output), layer.feed_forward_kernels()
    if qkv is None or output is None or feed_forward is None:
        return False
    norms = [layer.norm_kernel(name) for name in NORMS]
    variant, rope = layer.variant, layer.spec.rope
    scores = variant.scaling, variant.window, variant.softcap, variant.sinks
    kernel.add_layer(norms, qkv, output, *feed_forward, -1 if rope is None else rope, *scores)
    return True
