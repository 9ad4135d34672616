"""The steps of the paged path that are captured as CUDA graphs: with and without prompts, drafts and adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from tgi_server.engine.backends.base import PassInput, TopOnly
from tgi_server.engine.parallel import ShardGroup, fault_of_any
from tgi_server.engine.parallel.layers import VocabParallelHead
from tgi_server.engine.runners.graphs import Capture, DecodeGraphs, try_capture
from tgi_server.engine.runners.paged_batch import PagedBatch
from tgi_server.engine.runners.prompt_graphs import PromptGraphs, graph_token_counts
from tgi_server.engine.sampling import argmax

T = TypeVar("T")

# Steps with drafted tokens are captured for at most this many rows: beside more, no draft is worth its time.
_MOST_DRAFTING_ROWS = 64


@dataclass(slots=True)
class CapturedSteps:
    """The captured steps of each kind; None: there are none of this kind.

    decoding: steps in which rows without adapters decode; they return the logits and the argmax of each row, which is
    the row's next input. adapted: the same with adapters. drafting: steps with drafted tokens; they return logits.
    prompts: steps with prompts. head: the head, if `decoding` and `adapted` return the logits of this shard's part of
    the vocabulary; None: they return all logits.
    """

    decoding: DecodeGraphs | None = None
    adapted: DecodeGraphs | None = None
    drafting: DecodeGraphs | None = None
    prompts: PromptGraphs | None = None
    head: VocabParallelHead | None = None

    def decode(self, rows: int, top: TopOnly | None, *, adapted: bool) -> tuple[Tensor, Tensor] | None:
        """Decodes rows. Returns their logits and the argmax of each row; None if no captured step is large enough.

        If only the argmax is needed (`top`), the logits may be those of a part of the vocabulary.
        """
        graphs = self.adapted if adapted else self.decoding
        outputs = graphs.run(rows) if graphs else None
        if outputs is None:
            return None
        logits, argmax_ids = outputs
        greedy = top is not None and top.count == 1 and top.mask is None
        return logits if greedy or self.head is None else self.head.gathered(logits), argmax_ids


class StepCapture:
    """Captures the steps of a batch. All shards of a model capture the same ones."""

    def __init__(
        self,
        batch: PagedBatch,
        run: Callable[[PassInput], Tensor],
        capture: Capture,
        group: ShardGroup | None,
        faults: dict[str, str],
        head: VocabParallelHead | None = None,
    ) -> None:
        """run: computes the logits of a pass. faults: reasons for which kinds of steps cannot be captured; added to.

        head: head of a split vocabulary, whose logits stay split in decoding steps; None: `run` returns all logits.
        """
        self._head = head
        self._batch = batch
        self._run = run
        self._capture = capture
        self._group = group
        self._faults = faults

    def decoding(self, sizes: Sequence[int], *, any_adapters: bool = False) -> DecodeGraphs | None:
        """Captures steps in which rows decode. any_adapters: True if the rows may have any adapters."""
        step = partial(self._decode, any_adapters=any_adapters)
        what = "decoding with adapters" if any_adapters else "decoding"
        return self._captured(what, lambda: DecodeGraphs(sizes, step, self._capture))

    def drafting(self, sizes: Sequence[int]) -> DecodeGraphs | None:
        """Captures steps of up to this many rows, each with the most drafted tokens."""
        few = [size for size in sizes if size <= _MOST_DRAFTING_ROWS]
        if not few:
            return None
        return self._captured("checking drafts", lambda: DecodeGraphs(few, self._draft, self._capture))

    def prompts(self, most: int, block_size: int) -> PromptGraphs | None:
        """Captures steps with prompts, up to this many tokens."""
        counts, rows, tables = graph_token_counts(most), len(self._batch), self._batch.block_tables.table
        return self._captured(
            "computing prompts", lambda: PromptGraphs(counts, rows, tables, block_size, self._run, self._capture)
        )

    def _captured(self, what: str, make: Callable[[], T]) -> T | None:
        if what in self._faults:
            return None
        graphs, fault = try_capture(make, what)
        if fault := fault_of_any(fault, self._group):
            self._faults[what] = fault
            return None
        return graphs

    def _decode(self, rows: int, *, any_adapters: bool) -> tuple[Tensor, Tensor]:
        """Decodes, however long the sequences are. Returns logits, [rows, vocab_size], and the argmax of each row."""
        inputs = self._batch.decode_input(rows, longest=self._batch.max_total_tokens, any_adapters=any_adapters)
        if self._head is None:
            logits = self._run(inputs)
            argmax_ids = argmax(logits)
        else:
            with self._head.apart():
                logits = self._run(inputs)
            argmax_ids = self._head.argmax(logits)
        self._batch.follow(argmax_ids)
        return logits, argmax_ids

    def _draft(self, rows: int) -> tuple[Tensor]:
        """Returns logits, [rows, 1 + drafted tokens, vocab_size]."""
        inputs = self._batch.draft_input(rows)
        return (self._run(inputs).unflatten(0, (rows, inputs.metadata.row_tokens)),)
