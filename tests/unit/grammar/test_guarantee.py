"""Whatever a model says: a text that ended matches its grammar, and one that was cut is the beginning of a match."""

import json
import random
import re
from datetime import datetime
from typing import Any

import jsonschema
import pytest
import regex
import rstr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.grammars import compiler_fault, demo_compiler, left_to_model
from tests.unit.grammar.acceptance import accepts
from tests.unit.grammar.completion import completed, random_text
from tests.unit.grammar.driver import Driver
from tests.unit.grammar.schemas import LOGICAL_SCHEMAS, SCHEMAS, values_of
from tgi_server.contract import FinishReason, Grammar, GrammarKind
from tgi_server.engine import Engine
from tgi_server.engine.errors import InvalidCall

PROMPT = [1, 40, 41, 42]
NEW = 120
FEW, MANY = 30, 500

ATOMS = [
    *(r"[a-z]", r"\d", r"\w", r"[^x]", "a", "[A-F0-9]", r"\.", "(ab|cd)", "(?:x|yz)", r"\s", "é", r"[\w-]", r"\D", "-"),
    *(r"\S", r"\W", r"[^\W\d]", "[,;]", "(?i:Ab)", "."),
]
REGEXES = st.lists(
    st.tuples(st.sampled_from(ATOMS), st.sampled_from(["", "?", "*", "+", "{2}", "{1,3}"])), min_size=1, max_size=5
)


def as_regex(parts: list[tuple[str, str]]) -> str:
    return "".join(atom + repeat for atom, repeat in parts)


def check_regex(engine: Engine, pattern: str, seed: int) -> bool:
    """Returns True if the text ended."""
    driver = Driver(engine)
    (output,) = driver.run(driver.sequence(PROMPT, Grammar(GrammarKind.REGEX, pattern), NEW, seed=seed))
    assert output.error is None
    text = driver.text(output)
    if output.finish_reason is FinishReason.EOS_TOKEN:
        assert re.fullmatch(pattern, text), (pattern, text)
        return True
    whole = text.rstrip("\ufffd")  # a character may have been cut
    assert regex.fullmatch(pattern, whole, partial=True), (pattern, whole)
    return False


def check_schema(engine: Engine, schema: Any, seed: int) -> bool | None:
    """Returns True if the text ended; None for a schema that is refused."""
    driver = Driver(engine)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    try:
        (output,) = driver.run(driver.sequence(PROMPT, grammar, NEW, seed=seed))
    except InvalidCall:
        return None
    assert output.error is None
    text = driver.text(output)
    ended = output.finish_reason is FinishReason.EOS_TOKEN
    if not ended:
        assert engine.grammars is not None
        whole = completed(engine.grammars, grammar, driver.visible(output))
        assert whole.startswith(text.rstrip("\ufffd")), (text, whole)
        text = whole
    jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
    return ended


FORMATS = jsonschema.FormatChecker(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_DURATION = re.compile(r"P(?!$)((\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?|\d+W)")


# Those for which `jsonschema` would need further packages.
@FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(text: object) -> bool:
    return not isinstance(text, str) or ("T" in text and datetime.fromisoformat(text).tzinfo is not None)


@FORMATS.checks("hostname")
def _is_hostname(text: object) -> bool:
    return not isinstance(text, str) or (len(text) <= 253 and _HOSTNAME.fullmatch(text) is not None)


@FORMATS.checks("duration")
def _is_duration(text: object) -> bool:
    return not isinstance(text, str) or _DURATION.fullmatch(text) is not None


def many(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def run_regexes(engine: Engine, examples: int) -> None:
    ended = []

    @many(examples)
    @given(REGEXES, st.integers(0, 2**32))
    def follow(parts: list[tuple[str, str]], seed: int) -> None:
        ended.append(check_regex(engine, as_regex(parts), seed))

    follow()
    assert sum(ended) > examples // 10, "nearly no text ended, so nearly none was checked"


def run_schemas(engine: Engine, examples: int) -> None:
    ended = []

    @many(examples)
    @given(SCHEMAS, st.integers(0, 2**32))
    def follow(schema: Any, seed: int) -> None:
        ended.append(check_schema(engine, schema, seed))

    follow()
    assert ended.count(True) > examples // 4, f"of {len(ended)} texts {ended.count(True)} ended"


def run_logical_schemas(examples: int) -> None:
    """Follows schemas whose keywords are rewritten as others. Those that cannot be are refused or left to the model."""
    taken = []

    @many(examples)
    @given(LOGICAL_SCHEMAS, st.integers(0, 2**32))
    def follow(schema: Any, seed: int) -> None:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        taken.append(compiler_fault(grammar) is None and not left_to_model(grammar))
        if taken[-1]:
            text = random_text(demo_compiler(), grammar, seed)
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))

    follow()
    assert taken.count(True) > examples // 3, f"of {len(taken)} schemas {taken.count(True)} were taken"


def test_regexes(random_engine: Engine) -> None:
    run_regexes(random_engine, FEW)


def test_schemas(random_engine: Engine) -> None:
    run_schemas(random_engine, FEW)


def test_logical_schemas() -> None:
    run_logical_schemas(FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_logical_schemas() -> None:
    run_logical_schemas(2 * MANY)


def test_regexes_with_drafts(drafting_engine: Engine) -> None:
    run_regexes(drafting_engine, FEW // 2)


def test_schemas_with_drafts(drafting_engine: Engine) -> None:
    run_schemas(drafting_engine, FEW // 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["random_engine", "drafting_engine"])
def test_many_regexes(engine: str, request: pytest.FixtureRequest) -> None:
    run_regexes(request.getfixturevalue(engine), MANY)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["random_engine", "drafting_engine"])
def test_many_schemas(engine: str, request: pytest.FixtureRequest) -> None:
    run_schemas(request.getfixturevalue(engine), MANY)


@pytest.mark.parametrize("pattern", [as_regex([(atom, "{2,4}")]) for atom in ATOMS])
def test_no_expression_is_stricter_than_it_has_to_be(random_engine: Engine, pattern: str) -> None:
    """ASCII texts that match can be generated; beyond ASCII, letters and digits are not what they are in Python."""
    made = rstr.Rstr(random.Random(1))
    compiler = random_engine.grammars
    assert compiler is not None
    texts = [made.xeger(pattern) for _ in range(20)]
    for text in texts:
        if text.isprintable() and (text.isascii() or "é" in pattern):
            assert accepts(compiler, Grammar(GrammarKind.REGEX, pattern), text), text


@many(FEW)
@given(SCHEMAS.flatmap(lambda schema: st.tuples(st.just(schema), values_of(schema))))
def test_no_schema_is_stricter_than_it_has_to_be(random_engine: Engine, case: tuple[Any, Any]) -> None:
    schema, value = case
    described = json.dumps(schema)
    if "number" in described or "time" in described or "duration" in described:
        return  # numbers and times may be written in more ways than grammars take: 1e-7
    compiler = random_engine.grammars
    assert compiler is not None
    text = json.dumps(value, ensure_ascii=False)
    assert accepts(compiler, Grammar(GrammarKind.JSON_SCHEMA, described), text), text
