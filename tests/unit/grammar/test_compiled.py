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
    kept = CompiledGrammars(limit=100)
    for number, size in ((1, 40), (2, 30), (3, 30)):
        kept.add(grammar(number), compiled(size))
    assert kept.find(grammar(1)) is not None
    kept.add(grammar(4), compiled(60))
    assert [kept.find(grammar(number)) is not None for number in (1, 2, 3, 4)] == [True, False, False, True]
    assert kept.size == 100


def test_a_grammar_that_is_compiled_again_counts_once() -> None:
    kept = CompiledGrammars(limit=100)
    for size in (50, 90, 60):
        kept.add(grammar(1), compiled(size))
        assert kept.size == size


def test_pinned_ones_stay_however_often_they_are_pinned() -> None:
    kept = CompiledGrammars(limit=100)
    kept.pin(grammar(1))
    kept.pin(grammar(1))
    kept.add(grammar(1), compiled(80))
    kept.add(grammar(2), compiled(20))
    with pytest.raises(NoRoomForGrammar):
        kept.add(grammar(3), compiled(30))
    kept.unpin(grammar(1))
    with pytest.raises(NoRoomForGrammar):
        kept.add(grammar(3), compiled(30))
    assert kept.find(grammar(2)) is not None
    kept.unpin(grammar(1))
    kept.add(grammar(3), compiled(30))
    assert kept.find(grammar(1)) is None
    assert kept.size == 50
