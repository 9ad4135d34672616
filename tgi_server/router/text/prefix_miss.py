"""Explains misses of the prefix cache: the cause, and the first difference to the nearest earlier prompt."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import count, takewhile

from tgi_server.router.prompt_source import KnownPrompt, MissCause, PrefixLookup, PromptSource
from tgi_server.router.scheduling.prefix_cache import common_prefix
from tgi_server.router.text.prompt_place import Difference, difference
from tgi_server.router.text.tokenizer import TextTokenizer

_WIDTH = 4  # bytes of a token
# Two prompts count as equal after a difference if they have this many consecutive tokens in common there. They are
# found by searching for this many tokens.
_ALIKE_TOKENS, _SEARCHED_TOKENS = 16, 8
_TRIES = 16
# Requests that share the cache with others get numbers of tokens rounded down to multiples of this.
_SHARED_STEP = 128
# Maximum number of explained requests that are kept.
_MOST_EXPLAINED = 1024


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """The tokens of a prompt that the prefix cache had, and the cause for which it did not have the others.

    cause: None if nothing was missing. found_tokens: tokens that need not be computed. known_tokens: tokens at the
    beginning of the prompt that were cached at some time. movable_tokens: known tokens after the difference, which
    would have been found if the difference came after them. difference: the first difference to the nearest prompt;
    None: there is no such prompt, or the prompt continues it.
    """

    cause: MissCause | None
    prompt_tokens: int
    found_tokens: int
    known_tokens: int
    movable_tokens: int = 0
    difference: Difference | None = None

    @property
    def missing_tokens(self) -> int:
        """Number of tokens that had to be computed, without the last one, which always has to be."""
        return max(self.prompt_tokens - 1 - self.found_tokens, 0)

    def as_shared(self) -> "PrefixMiss":
        """Returns the part of the explanation for requests that share the cache with other users."""
        hidden = self.cause in (MissCause.OTHER_SALT, MissCause.OTHER_ADAPTER)
        return PrefixMiss(
            MissCause.NEVER_SEEN if hidden else self.cause,
            self.prompt_tokens,
            _in_steps(self.found_tokens),
            _in_steps(self.known_tokens),
            _in_steps(self.movable_tokens),
        )


def explain(source: PromptSource, tokenizer: TextTokenizer) -> PrefixMiss | None:
    """Returns the explanation of a prompt; None if the prompt was not looked up."""
    look = source.lookup
    if look is None:
        return None
    prompt = len(look.tokens) // _WIDTH
    last = prompt - 1  # it is computed in any case
    found = min(look.found, last)
    known = min(max(look.known, found), last)
    plain = PrefixMiss(None, prompt, found, known)
    if found == last:
        return plain
    if look.elsewhere >= known + look.block_size:
        cause = MissCause.OTHER_ADAPTER if look.other_adapter else MissCause.OTHER_SALT
        return replace(plain, cause=cause)
    if known - found >= last - known:
        return replace(plain, cause=_lost(look, found, known))
    return _new(plain, source, look, tokenizer)


def _lost(look: PrefixLookup, found: int, known: int) -> MissCause:
    """Returns the cause for which tokens that were cached once are not used."""
    if known - found < look.block_size:
        return MissCause.BELOW_BLOCK
    return MissCause.NO_STATE if look.held - found >= look.block_size else MissCause.EVICTED


def _new(plain: PrefixMiss, source: PromptSource, look: PrefixLookup, tokenizer: TextTokenizer) -> PrefixMiss:
    """Returns the explanation of a prompt that is mostly new: no earlier prompt begins with most of it."""
    miss = replace(plain, cause=MissCause.NEVER_SEEN)
    parting = {other: common_prefix(other.tokens, look.tokens, 0) // _WIDTH for other in look.similar}
    if any(parted * _WIDTH == len(other.tokens) for other, parted in parting.items() if parted >= plain.known_tokens):
        return miss  # it continues another one
    alike: dict[KnownPrompt, int] = {}
    for other, parted in parting.items():
        alike[other] = _alike(look.tokens, other.tokens, parted)
        if 2 * alike[other] >= plain.missing_tokens:
            break
    nearest = max(alike, key=lambda other: (alike[other], parting[other]), default=None)
    if nearest is None or not parting[nearest] + alike[nearest]:
        return miss
    parted = parting[nearest]
    found = difference(source, nearest, parted, tokenizer)
    image = next((place for place in range(len(look.images)) if _covers(look.images[place], parted)), None)
    if image is not None:
        place = source.images[image] if image < len(source.images) else found.place
        found = replace(found, place=place, offset=None, before="", here="", earlier="", by_template=False)
    elif alike[nearest] < _ALIKE_TOKENS:
        return replace(miss, difference=found)
    cause = MissCause.TEMPLATE if found.by_template else MissCause.CHANGED
    return replace(miss, cause=cause, movable_tokens=alike[nearest], difference=found)


def _covers(image: tuple[int, int], token: int) -> bool:
    start, length = image
    return start <= token < start + length


def _alike(prompt: bytes, other: bytes, parted: int) -> int:
    """Returns how many consecutive tokens after a difference are the same in both prompts; 0 if fewer than some.

    parted: number of tokens before the difference. Searches at growing distances from the difference and from the end.
    """
    start, width = parted * _WIDTH, _SEARCHED_TOKENS * _WIDTH
    last = len(prompt) - width
    distances = [0, *takewhile(lambda distance: distance <= last - start, (_WIDTH << power for power in count(0, 2)))]
    for place in (*(start + distance for distance in distances), *(last - distance for distance in distances)):
        if not start <= place <= last:
            continue
        at = _found(other, prompt[place : place + width], start)
        if at < 0:
            continue
        after = common_prefix(other[at:], prompt, place)
        before = _common_end(prompt[start:place], other[start:at])
        if after + before >= _ALIKE_TOKENS * _WIDTH:
            return (after + before) // _WIDTH
    return 0


def _found(text: bytes, tokens: bytes, start: int) -> int:
    """Returns the index of some tokens in a text at or after `start`; -1 if they are not found within _TRIES tries."""
    for _ in range(_TRIES):
        start = text.find(tokens, start)
        if start % _WIDTH == 0:
            return start
        if start < 0:
            break
        start += 1  # it was not the beginning of a token
    return -1


def _common_end(one: bytes, other: bytes) -> int:
    """Returns the length of the common suffix of two texts of tokens, in bytes of whole tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + _WIDTH) // (2 * _WIDTH) * _WIDTH
        if one[len(one) - middle :] == other[len(other) - middle :]:
            low = middle
        else:
            high = middle - _WIDTH
    return low


def _in_steps(tokens: int) -> int:
    return tokens // _SHARED_STEP * _SHARED_STEP


class ExplainedRequests:
    """Explanations of the latest requests, by cache namespace and id of the request."""

    def __init__(self) -> None:
        self._misses: OrderedDict[tuple[str, str], PrefixMiss] = OrderedDict()

    def add(self, namespace: str, request_id: str, miss: PrefixMiss) -> None:
        """Remembers a request."""
        self._misses[namespace, request_id] = miss
        self._misses.move_to_end((namespace, request_id))
        if len(self._misses) > _MOST_EXPLAINED:
            self._misses.popitem(last=False)

    def get(self, namespace: str, request_id: str) -> PrefixMiss | None:
        """Returns the explanation of a request; None if it is not kept."""
        return self._misses.get((namespace, request_id))

    def forget(self, namespace: str) -> None:
        """Forgets the requests of a namespace."""
        for name in [name for name in self._misses if name[0] == namespace]:
            del self._misses[name]
