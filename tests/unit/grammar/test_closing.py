"""A text that has to end soon ends with few tokens, and matches its grammar all the same."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.unit.grammar.driver import Driver
from tgi_server.contract import FinishReason, Grammar, GrammarKind
from tgi_server.engine import Engine

PROMPT = [1, 40, 41, 42, 43]
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "size": {"type": "object", "properties": {"width": {"type": "number"}}, "required": ["width"]},
        "colour": {"enum": ["red", "a very dark green"]},
        "count": {"type": "integer", "minimum": 12},
        "note": {"type": "string"},
    },
    "required": ["name", "tags", "size", "colour", "count"],
}
SCHEMAS: list[dict[str, Any]] = [
    NESTED,
    {"type": "array", "items": NESTED, "minItems": 2},
    {"anyOf": [{"type": "string", "minLength": 9}, {"type": "null"}, {"type": "array", "items": {"type": "boolean"}}]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object"},
    {"type": "string", "pattern": "^[0-9]{3}-[a-z]+$"},
]


def closed(engine: Engine, grammar: Grammar, steps: int, seed: int) -> tuple[str, int]:
    """Returns a text that is closed after some steps, if it has not ended, and the number of its tokens."""
    driver = Driver(engine)
    sequence = driver.sequence(PROMPT, grammar, 400, seed=seed)
    driver.join(sequence)
    for _ in range(steps):
        driver.step()
    if not sequence.ended:
        assert sequence.constraint is not None
        sequence.constraint.close()
    while driver.busy:
        driver.step()
    output = driver.outputs[sequence.request_id]
    assert output.finish_reason is FinishReason.EOS_TOKEN
    return driver.text(output), len(output.tokens)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize("steps", [0, 1, 12])
def test_json_is_whole_and_valid(random_engine: Engine, schema: dict[str, Any], steps: int) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    for seed in range(3):
        text, _ = closed(random_engine, grammar, steps, seed)
        jsonschema.validate(json.loads(text), schema)


def test_it_ends_with_few_tokens(random_engine: Engine) -> None:
    shortest = {"name": "", "tags": [""], "size": {"width": 0}, "colour": "red", "count": 12}
    tokens = len(Driver(random_engine).tokenizer.encode(json.dumps(shortest)))
    for seed in range(3):
        _, used = closed(random_engine, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(NESTED)), 0, seed)
        assert used <= tokens + 4


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.LARK])
def test_other_grammars_are_closed(random_engine: Engine, kind: GrammarKind) -> None:
    regex = "[a-z]{4,}( [a-z]+)*\\.|no"
    grammar = Grammar(kind, regex if kind is GrammarKind.REGEX else f"start: /{regex}/")
    for seed in range(4):
        text, used = closed(random_engine, grammar, 3, seed)
        assert re.fullmatch(regex, text)
        assert used < 20


def test_a_text_that_cannot_be_closed_goes_on(random_engine: Engine) -> None:
    driver = Driver(random_engine)
    sequence = driver.sequence(PROMPT, Grammar(GrammarKind.REGEX, "[ab]{300}"), 40)
    driver.join(sequence)
    assert sequence.constraint is not None
    sequence.constraint.close()
    while driver.busy:
        driver.step()
    assert driver.outputs[sequence.request_id].finish_reason is FinishReason.LENGTH
