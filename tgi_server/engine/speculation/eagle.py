"""EAGLE-3 and multi-token prediction: drafts from the model's hidden states, one token after the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.runners.hidden_states import HiddenStates
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.drafters import StateDrafter
from tgi_server.engine.speculation.last_pass import LastPass
from tgi_server.engine.speculation.layer_model import LayerModel
from tgi_server.engine.speculation.paged_drafter import MissingTokens, PagedDrafter

# Features of this many tokens of a sequence are stored until a draft for it is worth its time. With more, the layer
# computes them at once.
_MAX_STORED = 32


@dataclass(slots=True)
class _Features:
    """Features of a sequence's tokens that the drafter has not computed, from position `start` on.

    parts: [tokens, features] each, one after the other.
    """

    start: int
    parts: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.parts))


class Eagle(PagedDrafter, StateDrafter):
    """Proposes what EAGLE-3's layer, or one for multi-token prediction, makes of the features of a sequence's tokens.

    For each token but the last, the layer computes the token's features together with the token after it. Features are
    stored for some steps, so that a large batch, for which no draft pays off, does not compute this at every step.
    """

    def __init__(self, runner: PagedRunner, model: LayerModel, states: HiddenStates, token_ids: Tensor | None) -> None:
        """runner: the model's runner. token_ids: [drafter's vocabulary] int64; None: it has the model's vocabulary."""
        super().__init__(runner, behind=1)
        self._model = model
        self._states = states
        self._token_ids = token_ids
        self._last: LastPass | None = None
        self._features: WeakKeyDictionary[RunningSequence, _Features] = WeakKeyDictionary()

    def warm_up(self, capacity: CacheCapacity, group: ShardGroup | None) -> None:
        self._last = None
        self._features.clear()
        self._model.hold(capacity.max_batch_size)
        super().warm_up(capacity, group)

    def follow(self, last: LastPass) -> None:
        for chunk in last.chunks:
            if chunk.sequence not in self._features:
                self._runner.join(chunk.sequence)  # copies what it shares of a block
        self._last = last

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        seen = self._take_features()
        wanted = {sequence: tokens for sequence, tokens in room.items() if tokens > 0 and self._is_complete(sequence)}
        due = [
            sequence
            for sequence in seen
            if sequence not in wanted
            and (sequence.ended or self._features[sequence].end - self._features[sequence].start > _MAX_STORED)
        ]
        rows = sorted(wanted, key=lambda sequence: -wanted[sequence])
        chunks = [self._missing(sequence, last=sequence in wanted) for sequence in (*due, *rows)]
        if not chunks:
            return {}
        return dict(zip(rows, self._draft(chunks, rows, [wanted[sequence] for sequence in rows]), strict=True))

    def _take_features(self) -> list[RunningSequence]:
        """Notes the features of the last pass's tokens that are right. Returns their sequences."""
        if self._last is None:
            return []
        features, seen = torch.cat(self._states.layers, -1), dict[RunningSequence, None]()
        for span in self._last.spans():
            stored = self._features.get(span.sequence)
            if stored is None or stored.end != span.position:
                stored = self._features[span.sequence] = _Features(span.position)
            stored.parts.append(features[span.first : span.first + span.tokens])
            seen[span.sequence] = None
        self._last = None
        return list(seen)

    def _is_complete(self, sequence: RunningSequence) -> bool:
        """Returns True if the features of all tokens but the last one are there, or computed."""
        stored = self._features.get(sequence)
        return stored is not None and bool(stored.parts) and stored.end == sequence.length - 1

    def _missing(self, sequence: RunningSequence, *, last: bool) -> MissingTokens:
        """Returns the tokens after those with stored features, which are the input of the next pass."""
        stored = self._features[sequence]
        tokens = torch.tensor(sequence.tokens(stored.start + 1, stored.end + 1))
        before = [] if self._model.features is None else [self._model.features]
        self._model.features = torch.cat([*before, *stored.parts])
        chunk = MissingTokens(sequence, tokens, stored.start, all_logits=False, last=last)
        self._features[sequence] = _Features(stored.end)
        return chunk

    def _argmax(self, logits: Tensor) -> Tensor:
        ids = super()._argmax(logits)
        return ids if self._token_ids is None else self._token_ids[ids]
