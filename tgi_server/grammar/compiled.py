"""A cache of compiled grammars with a memory limit."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from llguidance import LLMatcher

from tgi_server.contract import Grammar
from tgi_server.grammar.errors import NoRoomForGrammar

# Maximum bytes by which a compiled grammar grows as steps compute states of its lexer, until the lexer's limits end it.
# Measured with the worst grammar that was tried.
GROWTH_BYTES = 24 * 2**20


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar in llguidance's own format.

    hints: the tokens of each hint, by its marker. unenforced: one line for each constraint of a JSON schema that is not
    enforced but left to the model. leniency: the level at which compiling began, see `enforced_schema`.
    """

    text: str
    hints: Mapping[int, list[int]] = field(default_factory=dict)
    unenforced: tuple[str, ...] = ()
    leniency: int = 0


@dataclass(slots=True)
class CompiledGrammar:
    """A grammar and its matcher.

    matcher: at the start of a text; each sequence gets a copy. size: bytes that it may grow to. spent: True once a
    sequence has reached a limit of the lexer: all copies share the lexer, so the grammar has to be compiled again.
    """

    source: GrammarSource
    matcher: LLMatcher
    size: int
    spent: bool = False


class CompiledGrammars:
    """A cache of compiled grammars. Evicts the least recently used of those that are not pinned.

    size: bytes of all grammars in it.
    """

    def __init__(self, limit: int) -> None:
        """limit: maximum `size`, in bytes."""
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
        """Stores a compiled grammar, and evicts others for it. Raises NoRoomForGrammar if pinned ones leave no room."""
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
        """Protects a grammar from eviction until it is unpinned as often as pinned. It may be compiled later."""
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
