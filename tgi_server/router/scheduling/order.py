"""The order of requests: lower `priority` first, then the key that has received less, then the earlier deadline."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from itertools import takewhile

from tgi_server.fairness import Shares
from tgi_server.router.scheduling.sequence import Sequence


class Order:
    """Orders the sequences that wait, and chooses the running ones that are preempted for one of them."""

    def __init__(self, *, fair: bool = False) -> None:
        """fair: True if tenants get shares of the tokens in proportion to their weights."""
        self._shares = Shares() if fair else None

    def enter(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Records a new sequence. others: all that wait or run."""
        if self._shares is not None:
            self._shares.enter(sequence.request.tenant, {each.request.tenant for each in others})

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Records tokens that were computed for a sequence."""
        if self._shares is not None:
            self._shares.charge(sequence.request.tenant, tokens, sequence.request.weight)

    def arrange(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Returns the sequences in the order in which they are served."""
        in_order = sorted(sequences, key=_place)
        return in_order if self._shares is None else _merged(in_order, self._shares)

    def ahead_of(self, sequence: Sequence, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Returns the waiting sequences that are served before a new one."""
        if self._shares is None:
            return list(takewhile(lambda each: each.place < sequence.place, waiting))
        return list(takewhile(lambda each: each is not sequence, self.arrange([*waiting, sequence])))

    def first(self, sequences: Iterable[Sequence]) -> Sequence | None:
        """Returns the sequence that is served first; None if there is none."""
        if self._shares is None:
            return min(sequences, key=_place, default=None)
        return next(iter(self.arrange(sequences)), None)

    def last(self, sequences: Iterable[Sequence]) -> Sequence:
        """Returns the sequence that is preempted if there is not enough memory for all."""
        return max(sequences, key=_place)

    def may_overtake(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> bool:
        """Returns False if it is certain that no running sequence is preempted for a waiting one."""
        first = next(iter(waiting), None)
        if first is None or self._shares is not None:
            return first is not None
        return any(each.priority > first.priority for each in running)

    def gives_way(self, sequence: Sequence, running: Collection[Sequence]) -> Sequence | None:
        """Returns the running sequence to preempt for the waiting `sequence`; None if that has to wait.

        The victim is of a lower class. Otherwise, if tenants have shares, it belongs to the tenant with most running
        sequences by its weight, if that tenant still has no fewer afterwards than the waiting sequence's tenant.
        """
        last = max(running, key=_place, default=None)
        if last is None or last.priority > sequence.priority or self._shares is None:
            return last if last is not None and last.priority > sequence.priority else None
        of_tenants: defaultdict[str, list[Sequence]] = defaultdict(list)
        for each in running:
            of_tenants[each.request.tenant].append(each)
        own = sequence.request
        with_it = (len(of_tenants.get(own.tenant, ())) + 1) / own.weight
        most = max(of_tenants.values(), key=_places)
        if most[0].request.tenant == own.tenant or (len(most) - 1) / most[0].request.weight < with_it:
            return None
        victim = max(most, key=_place)
        return victim if victim.priority >= sequence.priority else None


# Maximum number of tokens that shorter prompts may overtake a long one with at once, after as many of its own tokens.
_MOST_SAVED = 1024


class ShortPrompts:
    """Lets shorter prompts overtake the prompt that is computed first, which still gets half of the prompt tokens."""

    def __init__(self) -> None:
        self._first: Sequence | None = None
        self._owed = 0  # tokens of prompts that overtook it, less its own tokens since

    def passing(self, first: Sequence, others: Iterable[Sequence]) -> list[Sequence]:
        """Returns the sequences that overtake the first one in the next step, the shortest first."""
        if first is not self._first:
            self._first, self._owed = first, 0
        if self._owed > 0:
            return []
        shorter = [each for each in others if each.priority == first.priority and each.to_compute < first.to_compute]
        return sorted(shorter, key=lambda each: each.to_compute)

    def computed(self, passing: int, own: int) -> None:
        """Records the prompt tokens of a step: those of overtaking prompts, and those of the first one (`own`)."""
        self._owed = max(-_MOST_SAVED, self._owed + passing - own)


def _merged(sequences: Iterable[Sequence], shares: Shares) -> list[Sequence]:
    """Returns sequences ordered by priority, then by the tokens that their tenants have had, fewer first.

    sequences: sorted by `place`. Each sequence's prompt counts as had by its tenant for the sequences after it.
    """
    queues: defaultdict[tuple[int, str], list[Sequence]] = defaultdict(list)
    for sequence in sequences:
        queues[sequence.priority, sequence.request.tenant].append(sequence)
    heads: list[tuple[int, float, tuple[int, float, int], int, str]] = []
    for (priority, tenant), queue in queues.items():
        heappush(heads, (priority, shares.had(tenant), queue[0].place, 0, tenant))
    merged = []
    while heads:
        priority, had, _, index, tenant = heappop(heads)
        queue = queues[priority, tenant]
        sequence = queue[index]
        merged.append(sequence)
        if index + 1 < len(queue):
            had += sequence.remaining / sequence.request.weight
            heappush(heads, (priority, had, queue[index + 1].place, index + 1, tenant))
    return merged


def _places(sequences: list[Sequence]) -> float:
    """Returns the number of a tenant's sequences, divided by its weight."""
    return len(sequences) / sequences[0].request.weight


def _place(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.place
