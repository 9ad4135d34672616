"""The latest prompts, from which misses of the prefix cache are explained. The cache itself does not use them."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from operator import attrgetter
from typing import TypeVar

from tgi_server.router.prompt_source import KnownPrompt, PrefixLookup
from tgi_server.router.scheduling.prefix_cache import common_prefix
from tgi_server.router.scheduling.sequence import Sequence

_WIDTH = 4  # bytes of a token
# Maximum number of prompts, and of the bytes of their tokens, their texts and the texts of their requests.
_MOST_PROMPTS, _MOST_BYTES = 1024, 64 * 2**20
# Maximum number of neighbors that are looked at, and of similar prompts of each kind that are recorded.
_NEIGHBORS, _NEAREST = 32, 2

N = TypeVar("N")
_tokens_of, _request_of = attrgetter("tokens"), attrgetter("request_id")


class _SortedPrompts:
    """Prompts in the order of their tokens, so that those with the most tokens in common are neighbors."""

    def __init__(self) -> None:
        self._prompts: list[KnownPrompt] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: KnownPrompt) -> None:
        self._prompts.insert(bisect_left(self._prompts, prompt.tokens, key=_tokens_of), prompt)

    def remove(self, prompt: KnownPrompt) -> None:
        index = bisect_left(self._prompts, prompt.tokens, key=_tokens_of)
        while self._prompts[index] is not prompt:
            index += 1
        del self._prompts[index]

    def covered(self, tokens: bytes) -> Iterator[KnownPrompt]:
        """Yields the prompts that are a prefix of `tokens` or equal to them, the longest first."""
        prompts = self._prompts
        index = bisect_left(prompts, tokens, key=_tokens_of)
        if index < len(prompts) and prompts[index].tokens == tokens:
            yield prompts[index]
        for place in range(index - 1, -1, -1):
            if not tokens.startswith(prompts[place].tokens):
                return
            yield prompts[place]

    def common(self, tokens: bytes) -> int:
        """Returns the length in bytes of the longest common prefix of `tokens` and any of the prompts."""
        index = bisect_left(self._prompts, tokens, key=_tokens_of)
        beside = self._prompts[max(index - 1, 0) : index + 1]
        return max((common_prefix(prompt.tokens, tokens, 0) for prompt in beside), default=0)

    def beginning(self, tokens: bytes) -> list[KnownPrompt]:
        """Returns prompts that begin with `tokens`, the latest first; only some of them if there are many."""
        start = bisect_left(self._prompts, tokens, key=_tokens_of)
        found = takewhile(lambda prompt: prompt.tokens.startswith(tokens), self._prompts[start : start + _NEIGHBORS])
        return sorted(found, key=_request_of, reverse=True)


class PromptHistory:
    """Remembers prompts by API key, salt and adapter. The oldest are forgotten."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[int, KnownPrompt] = {}
        self._all: OrderedDict[KnownPrompt, None] = OrderedDict()
        self._by_space: dict[tuple[str, str], _SortedPrompts] = {}
        self._by_owner: dict[str, _SortedPrompts] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def look_up(self, sequence: Sequence, space: tuple[str, str], held: int) -> None:
        """Records how the prompt of a sequence relates to earlier ones, when the sequence is admitted.

        held: number of the prompt's tokens that are in the cache, usable or not.
        """
        source = sequence.request.source
        if source is None or source.lookup is not None or sequence.reports_prompt:
            return
        tokens = sequence.beginning(sequence.prompt_tokens)
        own, owned = self._by_space.get(space), self._by_owner.get(sequence.request.tenant)
        common = own.common(tokens) if own is not None else 0
        elsewhere = owned.common(tokens) if owned is not None else 0
        nearest = own.beginning(tokens[:common]) if own is not None and common else []
        similar = nearest[:_NEAREST]
        if common < self._block_size * _WIDTH:  # a prefix shorter than a block says little
            latest = (prompt for prompt in islice(reversed(self._all), _NEIGHBORS) if prompt.space == space)
            similar += [prompt for prompt in islice(latest, _NEAREST) if prompt not in similar]
        others = owned.beginning(tokens[:elsewhere]) if owned is not None and elsewhere > common else []
        source.lookup = PrefixLookup(
            tokens,
            sequence.cached,
            held,
            max((min(prompt.cached, common // _WIDTH) for prompt in nearest), default=0),
            self._block_size,
            similar,
            elsewhere // _WIDTH if others else 0,
            any(prompt.space[1] == space[1] for prompt in others),
            [(image.start, image.length) for image in sequence.request.images],
        )

    def cached(self, sequence: Sequence, space: tuple[str, str], tokens: int) -> None:
        """Records that the first `tokens` tokens of a sequence are cached now."""
        source = sequence.request.source
        if source is None:
            return
        prompt = self._running.get(sequence.id)
        length = max(sequence.prompt_tokens, tokens)
        if prompt is not None and length * _WIDTH <= len(prompt.tokens):
            prompt.cached = max(prompt.cached, tokens)
            return
        request, text = sequence.request, sequence.beginning(length)
        made = KnownPrompt(request.id, request.tenant, space, text, sequence.prompt_tokens, tokens, source)
        if prompt is not None:
            self._drop(prompt)
        covered = [*self._by_space[space].covered(text)] if space in self._by_space else []
        for shorter in covered:
            if shorter.request_id not in self._running:
                self._drop(shorter)
        self._running[sequence.id] = made
        self._all[made] = None
        self._bytes += made.size
        self._by_space.setdefault(space, _SortedPrompts()).add(made)
        self._by_owner.setdefault(request.tenant, _SortedPrompts()).add(made)
        while len(self._all) > 1 and (len(self._all) > _MOST_PROMPTS or self._bytes > _MOST_BYTES):
            self._drop(next(iter(self._all)))

    def left(self, sequences: Iterable[Sequence]) -> None:
        """Records that only these sequences still have blocks."""
        self._running = {each.id: self._running[each.id] for each in sequences if each.id in self._running}

    def ended(self, sequence: Sequence) -> None:
        """Records that a sequence releases its blocks."""
        self._running.pop(sequence.id, None)

    def forget(self, namespace: str) -> None:
        """Deletes the prompts of a namespace."""
        for prompt in [each for each in self._all if each.space[1] == namespace]:
            self._drop(prompt)

    def _drop(self, prompt: KnownPrompt) -> None:
        del self._all[prompt]
        self._bytes -= prompt.size
        if self._running.get(prompt.request_id) is prompt:
            del self._running[prompt.request_id]
        _remove(self._by_space, prompt.space, prompt)
        _remove(self._by_owner, prompt.owner, prompt)


def _remove(lists: dict[N, _SortedPrompts], name: N, prompt: KnownPrompt) -> None:
    lists[name].remove(prompt)
    if not len(lists[name]):
        del lists[name]
