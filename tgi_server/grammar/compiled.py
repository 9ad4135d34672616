"""The grammars that have been compiled, within a bound of memory."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from llguidance import LLMatcher

from tgi_server.contract import Grammar
from tgi_server.grammar.errors import NoRoomForGrammar

# A compiled grammar takes more memory with each step that finds out something about its texts. The limits of the lexer
# end that: the worst grammar that was tried had grown by so much then.
GROWTH_BYTES = 24 * 2**20


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar in llguidance's own form.

    hints: tokens to show in the place of each marker. unenforced: constraints of a JSON schema that are left to the
    model, each as a line. leniency: how much was left to it from the beginning.
    """

    text: str
    hints: Mapping[int, list[int]] = field(default_factory=dict)
    unenforced: tuple[str, ...] = ()
    leniency: int = 0


@dataclass(slots=True)
class CompiledGrammar:
    """matcher: at its beginning; copied for each sequence. size: bytes, of all that it may come to take.

    spent: a sequence has met a limit, which all copies share.
    """

    source: GrammarSource
    matcher: LLMatcher
    size: int
    spent: bool = False


class CompiledGrammars:
    """A cache of compiled grammars. Unpinned ones are evicted, the least recently used first.

    size: bytes of all of them.
    """

    def __init__(self, limit: int) -> None:
        """limit: of the size."""
        self._limit = limit
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._pins: Counter[Grammar] = Counter()
        self.size = 0

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            found = self._grammars.get(grammar)
            if found is not None:
                self._grammars.move_to_end(grammar)
            return found

    def add(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Keeps a compiled grammar instead of an earlier one. Raises NoRoomForGrammar if requests need all room."""
        with self._lock:
            self._remove(grammar)
            unpinned = [each for each in self._grammars if not self._pins[each]]
            needed = self.size - sum(self._grammars[each].size for each in unpinned)
            if needed + compiled.size > self._limit:
                raise NoRoomForGrammar("the grammars of other requests use all the memory for grammars; try again soon")
            for oldest in unpinned:
                if self.size + compiled.size <= self._limit:
                    break
                self._remove(oldest)
            self._grammars[grammar] = compiled
            self.size += compiled.size

    def pin(self, grammar: Grammar) -> None:
        """Keeps the grammar, compiled or about to be, until it is unpinned as often as it was pinned."""
        with self._lock:
            self._pins[grammar] += 1

    def unpin(self, grammar: Grammar) -> None:
        with self._lock:
            self._pins[grammar] -= 1
            if not self._pins[grammar]:
                del self._pins[grammar]

    def clear(self) -> None:
        """Forgets all grammars that are not pinned."""
        with self._lock:
            for grammar in [each for each in self._grammars if not self._pins[each]]:
                self._remove(grammar)

    def _remove(self, grammar: Grammar) -> None:
        if (removed := self._grammars.pop(grammar, None)) is not None:
            self.size -= removed.size
