"""Which rows each rule of sampling concerns, ready on the device.

A plan holds as long as the same rows are sampled, which is for most steps of a batch; it is what keeps the steps
themselves free of loops over rows and of copies from the host.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Subset:
    """Some rows of a tensor. index: int64 `[k]` on the device; None: all rows."""

    index: Tensor | None

    def take(self, rows: Tensor) -> Tensor:
        return rows if self.index is None else rows.index_select(0, self.index)

    def put(self, rows: Tensor, part: Tensor) -> Tensor:
        """`rows` with `part` in this subset's places; overwrites `rows`."""
        return part if self.index is None else rows.index_copy_(0, self.index, part)


@dataclass(frozen=True, slots=True)
class Rule:
    """The rows of the scores that a rule concerns, its parameter for each `[k, 1]`, and the highest of these."""

    subset: Subset
    values: Tensor
    largest: float

    def apply(self, scores: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return self.subset.put(scores, change(self.subset.take(scores), self.values))


@dataclass(frozen=True, slots=True)
class Penalty:
    """A rule about counted tokens. slots: of the rows in the pool of counts, int64 `[k]`."""

    rule: Rule
    slots: Tensor

    def apply(self, scores: Tensor, pool: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        counts = pool.index_select(0, self.slots)
        return self.rule.apply(scores, lambda part, penalties: change(part, counts, penalties))


@dataclass(frozen=True, slots=True)
class Bias:
    """places: of the biased tokens in the flattened scores, int64; values: float32, one for each."""

    places: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Counted:
    """The rows whose tokens are counted, and their slots in the pool, int64 `[k]`."""

    subset: Subset
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the rows that sample do so. The rules' subsets are of these rows; seeds: int64, one for each."""

    subset: Subset
    seeds: Tensor
    temperature: Rule | None
    top_k: Rule | None
    top_p: Rule | None
    typical_p: Rule | None
    min_p: Rule | None


@dataclass(frozen=True, slots=True)
class Report:
    """The rows that something is reported of; positions: those rows among the logits; counts: how much of each."""

    subset: Subset
    positions: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with those rows of the logits that need more than an argmax, or with some of them. None: nothing.

    The scores are those rows of the logits, `processed`; state_rows: their rows in the sampler's state, and
    prompt_lengths in tokens, int64. masks: which of the masks are those of the `masked` rows. All other subsets are
    of the scores.
    """

    processed: Subset
    state_rows: Tensor
    prompt_lengths: Tensor
    masked: Subset | None
    masks: Subset
    watermark: Subset | None
    repetition: Penalty | None
    frequency: Penalty | None
    presence: Penalty | None
    bias: Bias | None
    drawing: Drawing | None
    logprobs: Report | None
    top_tokens: Report | None
    sequence_counts: Counted | None
    generated_counts: Counted | None
