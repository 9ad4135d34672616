"""The bound of memory of compiled grammars, and the pins of requests."""

import pytest
from llguidance import LLMatcher

from tests.grammars import demo_compiler
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import NoRoomForGrammar
from tgi_server.grammar.compiled import CompiledGrammar, CompiledGrammars, GrammarSource


def grammar(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, f"[a-z]{{{number}}}")


def compiled(size: int) -> CompiledGrammar:
    matcher = LLMatcher(demo_compiler().tokenizer.lookup, "start: /a/", log_level=0)
    return CompiledGrammar(GrammarSource("start: /a/"), matcher, size)


def test_the_least_recently_used_make_room() -> None:
    cache = CompiledGrammars(limit=100)
    for number, size in ((1, 40), (2, 30), (3, 30)):
        cache.add(grammar(number), compiled(size))
    assert cache.find(grammar(1)) is not None
    cache.add(grammar(4), compiled(60))
    assert [cache.find(grammar(number)) is not None for number in (1, 2, 3, 4)] == [True, False, False, True]
    assert cache.size == 100


def test_a_grammar_that_is_compiled_again_counts_once() -> None:
    cache = CompiledGrammars(limit=100)
    for size in (50, 90, 60):
        cache.add(grammar(1), compiled(size))
        assert cache.size == size


def test_pinned_ones_stay_however_often_they_are_pinned() -> None:
    cache = CompiledGrammars(limit=100)
    cache.pin(grammar(1))
    cache.pin(grammar(1))
    cache.add(grammar(1), compiled(80))
    cache.add(grammar(2), compiled(20))
    with pytest.raises(NoRoomForGrammar):
        cache.add(grammar(3), compiled(30))
    cache.unpin(grammar(1))
    with pytest.raises(NoRoomForGrammar):
        cache.add(grammar(3), compiled(30))
    assert cache.find(grammar(2)) is not None
    cache.unpin(grammar(1))
    cache.add(grammar(3), compiled(30))
    assert cache.find(grammar(1)) is None
    assert cache.size == 50
