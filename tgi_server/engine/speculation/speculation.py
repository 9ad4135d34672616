"""Drafts of the sequences in a step: of each as many tokens as make the text come fastest."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch

from tgi_server.engine.memory import copy_to_device
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity, PromptChunk, Runner
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.costs import StepCosts, measure_costs
from tgi_server.engine.speculation.draft import Acceptance, Draft
from tgi_server.engine.speculation.drafters import Drafter, ModelDrafter, StateDrafter
from tgi_server.engine.speculation.last_pass import LastPass

logger = logging.getLogger(__name__)

_NO_TOKEN = -1


class Speculation:
    """Plans the drafts of each step, and learns from how many tokens are accepted.

    most: maximum number of drafted tokens of a sequence in one step. drafters: the first one with a draft for a
    sequence is used. costs: costs of steps, measured at the warm-up; without them nothing is drafted.
    """

    def __init__(
        self,
        most: int,
        drafters: Sequence[Drafter],
        group: ShardGroup | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        """group: the shards of the model; None for a single shard. device: this shard's device."""
        self.drafters = drafters
        self.costs: StepCosts | None = None
        self.most = most
        self._group = group
        self._device = device
        self._acceptance: WeakKeyDictionary[RunningSequence, Acceptance] = WeakKeyDictionary()
        self._of_all = Acceptance()

    def warm_up(self, runner: Runner, capacity: CacheCapacity) -> None:
        """Warms up the drafters, and measures steps of the runner, whose cache has no sequences yet."""
        for drafter in self.drafters:
            if isinstance(drafter, ModelDrafter):
                drafter.warm_up(capacity, self._group)
        self.costs = measure_costs(runner, capacity, self._group)
        logger.info("duration of steps, by their number of tokens: %s", self.costs)

    def plan(self, sequences: Sequence[RunningSequence], rows: int, block_size: int) -> list[Draft]:
        """Returns the drafts of a step that computes `rows` tokens besides, and yields a token of each sequence."""
        if self.costs is None:
            return []
        proposed = self._propose(self.costs, sequences, rows, block_size)
        chances = [draft.acceptance.chance for draft in proposed]
        worth = self.costs.worth([len(draft.tokens) for draft in proposed], chances, rows, len(sequences))
        for draft, tokens in zip(proposed, worth, strict=True):
            del draft.tokens[tokens:]
            if not tokens:
                draft.acceptance.skip()
        return [draft for draft in proposed if draft.tokens]

    def follow(self, rows: Sequence[RunningSequence], chunks: Sequence[PromptChunk], drafts: Sequence[Draft]) -> None:
        """Tells the drafters of a pass whose tokens are not chosen yet: rows that decode, chunks, and drafts."""
        readers = [drafter for drafter in self.drafters if isinstance(drafter, StateDrafter)]
        if readers:
            last = LastPass(rows, chunks, drafts)
            for drafter in readers:
                drafter.follow(last)

    def _propose(
        self, costs: StepCosts, sequences: Sequence[RunningSequence], rows: int, block_size: int
    ) -> list[Draft]:
        drafts: list[Draft] = []
        room = self._room(costs, sequences, rows, block_size)
        for drafter in self.drafters:
            if isinstance(drafter, ModelDrafter):
                worth = self._worth_computing(drafter, costs, room, rows, len(sequences))
                proposals = self._agreed(drafter.propose(worth), worth)
            else:
                proposals = drafter.propose(room)
            for sequence in list(room):
                if tokens := proposals.get(sequence):
                    drafts.append(Draft(sequence, tokens, self._acceptance_of(sequence)))
                    del room[sequence]
        for draft in drafts:
            draft.cut()
        return [draft for draft in drafts if draft.tokens]

    def _room(
        self, costs: StepCosts, sequences: Sequence[RunningSequence], rows: int, block_size: int
    ) -> dict[RunningSequence, int]:
        """Returns how many tokens may be drafted for each sequence; for none if no draft can be worth its time."""
        acceptances = [self._acceptance_of(sequence) for sequence in sequences]
        surest = max((acceptance.chance for acceptance in acceptances), default=0.0)
        if surest <= costs.least_chance(rows, len(sequences), self.most * len(sequences)):
            for acceptance in acceptances:
                acceptance.skip()
            return {}
        room = {sequence: min(self.most, sequence.draft_room(block_size)) for sequence in sequences}
        return {sequence: tokens for sequence, tokens in room.items() if tokens > 0}

    def _worth_computing(
        self,
        drafter: ModelDrafter,
        costs: StepCosts,
        room: Mapping[RunningSequence, int],
        rows: int,
        expected: int,
    ) -> dict[RunningSequence, int]:
        """Returns how many tokens to draft for each sequence, at most its `room`, that have to be computed."""
        acceptances = [self._acceptance_of(sequence) for sequence in room]
        seconds = partial(drafter.seconds, sequences=len(room))
        worth = costs.worth(
            [*room.values()], [acceptance.chance for acceptance in acceptances], rows, expected, seconds
        )
        for acceptance, tokens in zip(acceptances, worth, strict=True):
            if not tokens:
                acceptance.skip()
        return dict(zip(room, worth, strict=True))

    def _agreed(
        self, drafts: dict[RunningSequence, list[int]], room: Mapping[RunningSequence, int]
    ) -> dict[RunningSequence, list[int]]:
        """Returns the drafts of the first shard, which computes as the others do, but may round otherwise."""
        longest = max(room.values(), default=0)
        if self._group is None or not longest:
            return drafts
        own = [drafts.get(sequence, []) for sequence in room]
        padded = torch.tensor([draft + [_NO_TOKEN] * (longest - len(draft)) for draft in own])
        first = self._group.all_gather(copy_to_device(padded, self._device))[:, :longest].tolist()
        return {
            sequence: [token for token in draft if token != _NO_TOKEN]
            for sequence, draft in zip(room, first, strict=True)
        }

    def _acceptance_of(self, sequence: RunningSequence) -> Acceptance:
        acceptance = self._acceptance.get(sequence)
        if acceptance is None:
            acceptance = self._acceptance[sequence] = self._of_all.of_another()
        return acceptance
