"""Compiling: refusals, the cache, and that a slow grammar does not delay others."""

import json
import random
import threading
import time
from collections.abc import Mapping

import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tests import hostile_grammars as hostile
from tests.grammars import demo_compiler
from tgi_server import demo_model
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import GrammarCompiler, InvalidGrammar, NoRoomForGrammar, compiler
from tgi_server.grammar.compiled import GROWTH_BYTES
from tgi_server.grammar.json_schema import EnforcedSchema


def fresh_compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_model.PATH, 3072, [1])


def large_schema(seed: int, members: int = 200) -> Grammar:
    numbers = random.Random(seed)
    properties = {
        f"member {seed} {i}": {"type": "string", "maxLength": numbers.randint(3, 20)} if i % 2 else {"type": "integer"}
        for i in range(members)
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(GrammarKind.REGEX, "["), "character set"),
        (Grammar(GrammarKind.REGEX, "a(?=b)"), "look-ahead"),
        (Grammar(GrammarKind.LARK, "start: absent"), "absent"),
        (Grammar(GrammarKind.LARK, "nothing"), "Expected token"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not JSON"),
        (Grammar(GrammarKind.REGEX, "a" * 1_000_001), "bytes"),
        (Grammar(GrammarKind.LARK, "start: X\nX: /a/ & /b/"), "no text matches"),
        (
            Grammar(GrammarKind.LARK, "start: X\nX: " + " & ".join(f"/(.*{c}.{{12}}.*){{4}}/" for c in "abcdef")),
            "lexer",
        ),
        (
            Grammar(
                GrammarKind.JSON_SCHEMA,
                json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(3_000)}}),
            ),
            "items",
        ),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 200 + "{}" + "}" * 200), "levels deep"),
        (hostile.schema(hostile.opposites(200)), "'not'"),
        (hostile.schema(hostile.variants(30)), "'oneOf'"),
    ],
)
def test_what_cannot_be_compiled_is_reported_in_one_line_and_soon(grammar: Grammar, message: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidGrammar) as refusal:
        demo_compiler().check(grammar)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert time.process_time() - started < 5


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schemas that were compiled, one after the other."""
    schemas: list[str] = []
    enforced = compiler.enforced_schema

    def note(text: str, lenient: Mapping[str, int]) -> EnforcedSchema:
        schemas.append(text)
        return enforced(text, lenient)

    monkeypatch.setattr(compiler, "enforced_schema", note)
    return schemas


def test_a_grammar_is_compiled_once(compiled: list[str]) -> None:
    ours = fresh_compiler()
    for _ in range(3):
        ours.check(large_schema(1))
        ours.constraint(large_schema(1), [], 10, ignore_eos=False)
    assert len(compiled) == 1


def test_the_cache_has_a_limit_of_bytes(compiled: list[str]) -> None:
    ours = GrammarCompiler(demo_model.PATH, 3072, [1], cache_bytes=3 * GROWTH_BYTES)
    schemas = [large_schema(seed) for seed in range(4)]
    for schema in (*schemas, *schemas[2:], schemas[0]):
        ours.check(schema)
    assert compiled == [*(schema.value for schema in schemas), schemas[0].value]


def test_what_requests_need_is_not_forgotten(compiled: list[str]) -> None:
    ours = GrammarCompiler(demo_model.PATH, 3072, [1], cache_bytes=2 * GROWTH_BYTES)
    first, second, third = (large_schema(seed) for seed in range(3))
    for needed in (first, first, second):
        ours.cache.pin(needed)
        ours.check(needed)
    with pytest.raises(NoRoomForGrammar, match="other requests"):
        ours.check(third)
    ours.cache.unpin(first)
    with pytest.raises(NoRoomForGrammar):
        ours.check(third)
    ours.cache.unpin(first)
    ours.check(third)
    assert ours.size_of(first) is None
    assert ours.size_of(second) is not None
    assert ours.size_of(third) is not None


def test_a_grammar_that_is_not_in_the_cache_fails_its_sequence_and_is_not_compiled(compiled: list[str]) -> None:
    constraint = fresh_compiler().constraint(large_schema(1), [], 10, ignore_eos=False)
    assert constraint.error is not None
    assert not compiled


def test_sequences_do_not_disturb_each_other() -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]{3}")
    ours = demo_compiler()
    a, b = (ours.tokenizer.encode(letter)[0] for letter in "ab")
    ours.check(grammar)
    one, other = (ours.constraint(grammar, [], 10, ignore_eos=False) for _ in range(2))
    for token in (a, b, a):
        one.advance(token, 0)
    other.advance(b, 0)
    assert one.ended
    assert not other.ended
    assert other.error is None


def test_the_interpreter_goes_on_while_a_grammar_is_compiled() -> None:
    """The longest time for which no other Python code runs is a part of the time that compiling takes."""
    ours = fresh_compiler()
    assert ours.tokenizer
    seconds = 0.0
    done = threading.Event()

    def compile_it() -> None:
        nonlocal seconds
        started = time.perf_counter()
        ours.check(large_schema(1, members=900))
        seconds = time.perf_counter() - started
        done.set()

    threading.Thread(target=compile_it).start()
    longest, last = 0.0, time.perf_counter()
    while not done.is_set():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < seconds / 2


def test_a_request_that_met_a_limit_leaves_the_grammar_usable_for_later_ones() -> None:
    own = fresh_compiler()
    grammar = Grammar(GrammarKind.REGEX, "((a{1,500}){1,500}){1,500}")
    assert fault_within(own, grammar, 3000) is not None
    assert fault_within(own, grammar, 5) is None


def fault_within(own: GrammarCompiler, grammar: Grammar, tokens: int) -> str | None:
    """Returns the error of generating the letter a so many times; None if there is none."""
    own.check(grammar)
    constraint = own.constraint(grammar, [], tokens + 1, ignore_eos=False)
    letter = own.tokenizer.lookup.tokenize_bytes(b"a")[0]
    mask = allocate_token_bitmask(1, own.tokenizer.lookup.vocab_size)
    for _ in range(tokens):
        fill_next_token_bitmask(constraint.matcher, mask)
        constraint.advance(letter, room=0)
        if constraint.error is not None:
            return constraint.error
    return None
