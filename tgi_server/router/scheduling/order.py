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
        """fair: tenants get equal shares, by their weights."""
        self._shares = Shares() if fair else None

    def enter(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Notes a sequence that is new. others: all that wait or run."""
        if self._shares is not None:
            self._shares.enter(sequence.request.tenant, {each.request.tenant for each in others})

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Notes tokens that were computed for a sequence."""
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
        """Returns the one that is served first; None if there is none."""
        if self._shares is None:
            return min(sequences, key=_place, default=None)
        return next(iter(self.arrange(sequences)), None)

    def last(self, sequences: Iterable[Sequence]) -> Sequence:
        """Returns the one that is preempted when there is no memory for all."""
        return max(sequences, key=_place)

    def may_overtake(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> bool:
        """Returns False if certainly no running sequence is preempted for one that waits."""
        first = next(iter(waiting), None)
        if first is None or self._shares is not None:
            return first is not None
        return any(each.priority > first.priority for each in running)

    def gives_way(self, sequence: Sequence, running: Collection[Sequence]) -> Sequence | None:
        """Returns the running sequence that is preempted for one that waits; None if that one waits for its turn.

        It is one of a lower class; or else one of a tenant that runs more, by its weight, and still runs no
        fewer afterwards.
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


# Prompt tokens that pass a prompt at once, after as many of its own have been computed.
_MOST_SAVED = 1024


class ShortPrompts:
    """Lets shorter prompts pass the one that is computed first, which still gets half of what is computed."""

    def __init__(self) -> None:
        self._first: Sequence | None = None
        self._owed = 0  # tokens of others that passed it, less its own tokens since

    def passing(self, first: Sequence, others: Iterable[Sequence]) -> list[Sequence]:
        """Returns the other sequences that pass the first one in the next step, the shortest first."""
        if first is not self._first:
            self._first, self._owed = first, 0
        if self._owed > 0:
            return []
        shorter = [each for each in others if each.priority == first.priority and each.to_compute < first.to_compute]
        return sorted(shorter, key=lambda each: each.to_compute)

    def computed(self, passing: int, own: int) -> None:
        """Notes the prompt tokens of a step: of the prompts that passed, and of the first one."""
        self._owed = max(-_MOST_SAVED, self._owed + passing - own)


def _merged(sequences: Iterable[Sequence], shares: Shares) -> list[Sequence]:
    """Returns ordered sequences again, the ones of tenants that have had fewer tokens first.

    Each is charged with its prompt for those after it.
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
