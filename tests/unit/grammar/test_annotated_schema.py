"""`x-span` and `x-hint`: values taken from a text, and words that only the model sees."""

import json
from typing import Any

import pytest

from tests.grammars import demo_compiler
from tests.unit.grammar.acceptance import accepts
from tests.unit.grammar.driver import Driver
from tgi_server.contract import FinishReason, Grammar, GrammarKind, SamplingParameters
from tgi_server.engine import Engine
from tgi_server.grammar import InvalidGrammar

PROMPT = [1, 40, 41, 42]
TEXT = 'The oak said: "I am old."\nNobody heard it, for größe is quiet.'
WORDS = {"type": "string", "x-span": True}
CHARACTERS = {"type": "string", "x-span": "characters"}


def grammar(schema: dict[str, Any], text: str = TEXT) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), text)


def members(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("schema", "value", "accepted"),
    [
        (WORDS, "oak said", True),
        (WORDS, 'said: "I am', True),
        (WORDS, 'old."\nNobody', True),
        (WORDS, "größe", True),
        (WORDS, "The elm", False),
        (WORDS, "oa", False),
        (WORDS, " oak", False),
        (WORDS, "oak ", False),
        (WORDS, "", False),
        (WORDS, "oak heard", False),
        (CHARACTERS, "ak sa", True),
        (CHARACTERS, '"\nN', True),
        (CHARACTERS, "ö", True),
        (CHARACTERS, "oks", False),
        (CHARACTERS, "", False),
        ({"anyOf": [WORDS, {"type": "integer"}]}, 3, True),
        ({"anyOf": [WORDS, {"type": "integer"}]}, "elm", False),
        ({"type": "array", "items": WORDS, "minItems": 1, "maxItems": 2}, ["oak", "it"], True),
        ({"type": "array", "items": WORDS, "minItems": 1, "maxItems": 2}, [], False),
        ({"type": "array", "items": WORDS, "minItems": 1, "maxItems": 2}, ["oak", "it", "oak"], False),
        ({"type": "array", "items": WORDS}, [], True),
        (members(a=WORDS, n={"type": "integer"}), {"a": "oak", "n": 1}, True),
        (members(a=WORDS, n={"type": "integer"}), {"a": "oak", "n": "1"}, False),
        (members(a=WORDS, n={"type": "integer"}), {"a": "oak"}, False),
        ({"type": "object", "properties": {"n": {"type": "null"}, "a": WORDS, "m": WORDS}}, {}, True),
        (
            {"type": "object", "properties": {"n": {"type": "null"}, "a": WORDS, "m": WORDS}},
            {"n": None, "m": "it"},
            True,
        ),
        ({"type": "object", "properties": {"n": {"type": "null"}, "a": WORDS, "m": WORDS}}, {"m": "it"}, True),
        ({"type": "object", "properties": {"n": {"type": "null"}, "a": WORDS, "m": WORDS}}, {"m": "elm"}, False),
    ],
)
def test_spans(schema: dict[str, Any], value: Any, accepted: bool) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert accepts(demo_compiler(), grammar(schema), text) is accepted


def test_spans_behind_references() -> None:
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": members(
                name=WORDS, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, kind={"$ref": "#/$defs/kind"}
            ),
            "kind": {"enum": ["tree", "bush"]},
        },
    }
    inner = {"name": "oak", "next": None, "kind": "tree"}
    assert accepts(demo_compiler(), grammar(schema), json.dumps({"name": "it", "next": inner, "kind": "bush"}))
    assert not accepts(demo_compiler(), grammar(schema), json.dumps({"name": "it", "next": inner, "kind": "cat"}))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**WORDS, "minLength": 3}, "minLength"),
        ({**WORDS, "type": "integer"}, "string"),
        ({"x-span": "sentences"}, "'words'"),
        ({"x-span": 1}, "'words'"),
        ({**WORDS, "x-span-source": " "}, "no text"),
        ({"type": "integer", "x-hint": "how many"}, "belongs to a property"),
        ({"type": "array", "items": {"type": "integer", "x-hint": "each"}}, "belongs to a property"),
        (members(a={"type": "integer", "x-hint": ""}), "must be a text"),
        ({"allOf": [members(a=WORDS)]}, "supported below properties"),
        ({**members(a=WORDS), "propertyNames": {"minLength": 1}}, "supported below properties"),
        ({**members(a=WORDS), "required": ["b"]}, "'b'"),
    ],
)
def test_what_cannot_be_combined_is_reported(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        demo_compiler().check(grammar(schema))


def test_spans_of_a_random_model_are_verbatim(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    schema = members(words=WORDS, characters=CHARACTERS)
    ended = 0
    for output in driver.run(*(driver.sequence(PROMPT, grammar(schema), 200, seed=seed) for seed in range(12))):
        assert output.error is None
        if output.finish_reason is FinishReason.EOS_TOKEN:
            ended += 1
            assert all(value and value in TEXT for value in json.loads(driver.text(output)).values())
    assert ended > 6


HINTED = members(
    age={"type": "integer", "minimum": 0, "maximum": 99, "x-hint": "in years"},
    size={"enum": ["S", "L"], "x-hint": "as on the label"},
)


def test_hints_are_seen_by_the_model_and_by_nobody_else(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    plain = json.loads(json.dumps(HINTED).replace("x-hint", "title"))
    hinted, bare = driver.run(*(driver.sequence(PROMPT, grammar(schema), 200) for schema in (HINTED, plain)))
    assert set(json.loads(driver.text(hinted))) == set(json.loads(driver.text(bare))) == {"age", "size"}
    seen = driver.tokenizer.decode(hinted.tokens)
    assert '"age": (in years) ' in seen
    assert '"size": (as on the label) "' in seen
    assert "years" not in driver.text(hinted)
    assert hinted.tokens != bare.tokens


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        ({"type": ["string", "null"], "format": "uuid"}, None, "oak"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, 3, "3"),
        ({"type": "integer", "not": {"const": 3}}, 4, 3),
        ({"type": "string", "nullable": True, "maxLength": 2}, None, "oak"),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [2, 1], [2, 2]),
        ({**members(a={"type": "string"}), "minProperties": 2}, {"a": "x", "b": 1}, {"a": "x"}),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "ab", "a"),
        (
            {**members(day={"type": "string", "format": "date", "x-hint": "of birth"})},
            {"day": "2024-02-29"},
            {"day": 1},
        ),
        ({"anyOf": [WORDS, {"type": "null"}]}, "oak", "elm"),
    ],
    ids=str,
)
def test_hints_beside_any_keyword(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    compiler = demo_compiler()
    hinted = grammar(members(d={**schema, "x-hint": "as said"}))
    assert compiler.compiled(hinted)[0].hints
    plain = grammar(members(d=json.loads(json.dumps(schema).replace("x-hint", "title"))))
    for value, fits in ((right, True), (wrong, False)):
        assert accepts(compiler, plain, json.dumps({"d": value})) is fits
        assert accepts(compiler, hinted, json.dumps({"d": value})) is fits


def test_hints_change_what_follows(random_engine: Engine) -> None:
    """The model's next token depends on them: they are in its cache."""
    driver = Driver(random_engine)
    greedy = SamplingParameters()
    values = set()
    for hint in ("in years", "in months or so", "the old oak", "??", "brown fox", "a b c"):
        schema = members(age={"type": "string", "minLength": 12, "maxLength": 12, "x-hint": hint})
        (output,) = driver.run(driver.sequence(PROMPT, grammar(schema), 200, sampling=greedy))
        values.add(driver.text(output))
    assert len(values) > 1


def test_hints_survive_a_preemption(random_engine: Engine) -> None:
    expected = Driver(random_engine)
    whole = expected.run(expected.sequence(PROMPT, grammar(HINTED), 200))[0]
    for cut in range(1, len(whole.tokens)):
        driver = Driver(random_engine, scarce=True)
        (rest,) = driver.run(driver.sequence(PROMPT, grammar(HINTED), 200, generated_ids=whole.tokens[:cut]))
        assert whole.tokens[:cut] + rest.tokens == whole.tokens


def test_hints_count_and_are_left_out_where_there_is_no_room(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    room = len(driver.tokenizer.encode('{"age": ')) + 2
    (output,) = driver.run(driver.sequence(PROMPT, grammar(HINTED), room))
    assert output.finish_reason is FinishReason.LENGTH
    assert len(driver.visible(output)) == room
