"""Compiles the grammars of requests to matchers."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar.annotated_schema import annotated_lark
from tgi_server.grammar.compiled import GROWTH_BYTES, CompiledGrammar, CompiledGrammars, GrammarSource
from tgi_server.grammar.constraint import Constraint
from tgi_server.grammar.errors import InvalidGrammar, reason
from tgi_server.grammar.json_schema import JSON_LAYOUT, MOST_LENIENT, enforced_schema
from tgi_server.grammar.python_regex import rust_regex
from tgi_server.grammar.tokenizer import GrammarTokenizer

# Maximum bytes of all compiled grammars, each counted at the size that it may grow to: about 120 small ones.
CACHE_BYTES = 3 * 2**30

# Limits of the work that a grammar may cause, when it is compiled or in one step (at most 0.1 s).
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 4_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


# Compiling recurses into nested references and rules, takes about 5 KB of stack for each, and does not check for an
# overflow, which ends the process. Steps need little stack, however deep the grammar is.
COMPILE_STACK_BYTES = 64 * 2**20
_STACK_LOCK = threading.Lock()

T = TypeVar("T")


def on_stack(size: int, work: Callable[[], T]) -> T:
    """Calls `work` in a thread with a stack of `size` bytes. Returns its result, or raises its exception."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _STACK_LOCK:
        usual = threading.stack_size(size)
        try:
            thread = threading.Thread(target=run, name="grammar-compile")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return outcome.result()


class GrammarCompiler:
    """Compiles grammars for one model, and caches them.

    cache: the compiled grammars. Grammars of running requests are pinned in it.

    All methods are thread-safe; those that take long release the GIL. A client's grammar may take more time, memory or
    stack than there is: try it in a `Sandbox` first.
    """

    def __init__(
        self,
        model: Path,
        vocab_size: int,
        eos: Sequence[int],
        *,
        stack_bytes: int = COMPILE_STACK_BYTES,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Does not read the tokenizer yet: that is done when it is first needed.

        stack_bytes: stack size of a compilation; one that needs more ends the process. cache_bytes: maximum bytes of
        all grammars in the cache.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._eos = eos
        self._stack_bytes = stack_bytes
        self.cache = CompiledGrammars(cache_bytes)
        self._tokenizer: GrammarTokenizer | InvalidGrammar | None = None
        self._tokenizer_lock = threading.Lock()

    @property
    def tokenizer(self) -> GrammarTokenizer:
        """The model's tokenizer. Raises InvalidGrammar if it cannot be used."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = GrammarTokenizer.of_model(self._model, self._vocab_size, self._eos)
                except InvalidGrammar as error:
                    self._tokenizer = error  # no step may spend seconds on reading it again
            if isinstance(self._tokenizer, InvalidGrammar):
                raise InvalidGrammar(str(self._tokenizer))
            return self._tokenizer

    def forget(self) -> None:
        """Drops the grammars that are not pinned, and the tokenizer, which is read again when it is next needed."""
        self.cache.clear()
        with self._tokenizer_lock:
            if isinstance(self._tokenizer, GrammarTokenizer):
                self._tokenizer = None

    def compiled(self, grammar: Grammar, leniency: int = 0) -> tuple[GrammarSource, LLMatcher]:
        """Compiles a grammar. Returns its source in llguidance's format, and its matcher.

        If lenient places of a schema cannot be compiled, their level is raised, so that more of them is left to the
        model, until they can. leniency: the level to begin with, see `enforced_schema`. Raises InvalidGrammar with a
        one-line reason.
        """
        levels = dict.fromkeys(grammar.lenient, leniency)
        while True:
            try:
                source = self.source(grammar, levels)
                return replace(source, leniency=leniency), self.compile(source)
            except InvalidGrammar:
                faulty = self._faulty(grammar, [place for place in levels if levels[place] < MOST_LENIENT])
                if not faulty:
                    raise
                levels = {place: level + (place in faulty) for place, level in levels.items()}

    def _faulty(self, grammar: Grammar, places: Sequence[str]) -> Sequence[str]:
        """Returns the places whose schemas cannot be compiled alone; all of `places` if each of them can."""
        if len(places) <= 1:
            return places
        schema = json.loads(grammar.value)
        return [place for place in places if not self._compiles(schema, place)] or places

    def _compiles(self, schema: dict[str, Any], place: str) -> bool:
        homes = {home: schema[home] for home in ("$defs", "definitions") if home in schema}
        alone = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**homes, "$ref": place}))
        try:
            self.compile(self.source(alone, {place: 0}))
        except InvalidGrammar:
            return False
        return True

    def source(self, grammar: Grammar, lenient: Mapping[str, int]) -> GrammarSource:
        """Returns the grammar in llguidance's format. lenient: as in `enforced_schema`.

        Raises InvalidGrammar with a one-line reason.
        """
        check_size(grammar)
        try:
            return self._source(grammar, lenient)
        except ValueError as error:
            raise InvalidGrammar(reason(str(error))) from error
        except RecursionError as error:
            raise InvalidGrammar("it is nested too deep") from error

    def compile(self, source: GrammarSource) -> LLMatcher:
        """Returns the grammar's matcher, at the start of a text. Raises InvalidGrammar with a one-line reason."""
        lookup = self.tokenizer.lookup

        def new() -> LLMatcher:
            return LLMatcher(lookup, source.text, log_level=0, limits=LLParserLimits(**_LIMITS))

        matcher = on_stack(self._stack_bytes, new)
        # The first step fills caches that all later steps share, and fails if the grammar is too complex to be used.
        first = allocate_token_bitmask(1, lookup.vocab_size)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, first)
        if not matcher.is_error():
            matcher.compute_ff_tokens()
        if matcher.is_error():
            raise InvalidGrammar(reason(matcher.get_error()))
        if not first.any():
            raise InvalidGrammar("no text matches it")
        return matcher

    def check(self, grammar: Grammar) -> None:
        """Compiles the grammar unless the cache has it. Raises InvalidGrammar with a one-line reason."""
        if self.size_of(grammar) is None:
            self.cache.add(grammar, CompiledGrammar(*self.compiled(grammar), GROWTH_BYTES))

    def size_of(self, grammar: Grammar) -> int | None:
        """Returns the bytes that the compiled grammar may grow to; None if it has to be compiled first."""
        found = self.cache.find(grammar)
        return None if found is None or found.spent else found.size

    def constraint(
        self, grammar: Grammar, generated_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool
    ) -> Constraint:
        """Returns a constraint for a sequence. Compiles nothing: if the grammar is not in the cache, it has an error.

        generated_ids: tokens that the sequence generated before a preemption.
        """
        compiled = self.cache.find(grammar)
        if compiled is None:
            nothing = LLMatcher(self.tokenizer.lookup, "", log_level=0)
            constraint = Constraint(nothing, {}, self.tokenizer.eos, max_new_tokens, ignore_eos=ignore_eos)
            constraint.error = "it has not been compiled"
            return constraint
        constraint = Constraint(
            compiled.matcher.deep_copy(),
            compiled.source.hints,
            self.tokenizer.eos,
            max_new_tokens,
            ignore_eos=ignore_eos,
            closing=self.tokenizer.closing,
            on_fault=partial(setattr, compiled, "spent", True),
        )
        constraint.replay(generated_ids)
        return constraint

    def _source(self, grammar: Grammar, lenient: Mapping[str, int]) -> GrammarSource:
        match grammar.type:
            case GrammarKind.LARK:
                return GrammarSource(LLMatcher.grammar_from_lark(self.tokenizer.with_ids(grammar.value)))
            case GrammarKind.REGEX:
                return GrammarSource(LLMatcher.grammar_from_regex(rust_regex(grammar.value)))
            case GrammarKind.JSON_SCHEMA:
                schema = enforced_schema(grammar.value, lenient)
                if not schema.annotated and not grammar.frame:
                    text = LLMatcher.grammar_from_json_schema(schema.definition, overrides=JSON_LAYOUT)
                    return GrammarSource(text, unenforced=schema.left)
                markers = self.tokenizer.markers
                lark, hints = annotated_lark(schema.definition, grammar.text, markers, grammar.frame, schema.places)
                tokens = {token: self.tokenizer.encode(f"({hint}) ") for token, hint in hints.items()}
                return GrammarSource(LLMatcher.grammar_from_lark(lark), tokens, schema.left)


def check_size(grammar: Grammar) -> None:
    """Raises InvalidGrammar if the grammar has too many bytes to be compiled."""
    if fault := grammar.too_long():
        raise InvalidGrammar(fault)
