"""Schemas and instances of others: whatever is enforced allows nothing that they say is wrong.

They are read from the folders that two variables name, if these are set: JSON_SCHEMA_TEST_SUITE, the folder `tests` of
https://github.com/json-schema-org/JSON-Schema-Test-Suite (also in the source package of `jsonschema`), and
JSON_SCHEMA_BENCH, files of https://github.com/guidance-ai/jsonschemabench, each a schema, or an object with a schema
and tests. `pytest -s` shows how many were enforced.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.grammars import demo_compiler
from tests.unit.grammar.acceptance import accepts
from tests.unit.grammar.completion import random_text
from tests.unit.grammar.test_guarantee import FORMATS
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import InvalidGrammar

_DRAFTS = {
    "draft4": (jsonschema.Draft4Validator, "http://json-schema.org/draft-04/schema#"),
    "draft6": (jsonschema.Draft6Validator, "http://json-schema.org/draft-06/schema#"),
    "draft7": (jsonschema.Draft7Validator, "http://json-schema.org/draft-07/schema#"),
    "draft2019-09": (jsonschema.Draft201909Validator, None),
    "draft2020-12": (jsonschema.Draft202012Validator, None),
}
# What asks for other documents, and what says that formats mean nothing.
_LEFT_OUT = ("refRemote", "vocabulary", "format", "content")
_SAMPLE = 490
_TEXTS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Tally:
    """What became of the schemas. wrong: each text that was allowed and is not valid."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def take(self, schema: Any, tests: list[dict[str, Any]], validator: Any, name: str) -> None:
        """Tries instances on a schema, and texts that follow it on the validator."""
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        compiler = demo_compiler()
        try:
            compiler.check(grammar)
        except InvalidGrammar:
            self.counts["refused"] += 1
            return
        self.counts["enforced"] += 1
        for test in tests:
            text = json.dumps(test["data"], ensure_ascii=False)
            if not test["valid"] and accepts(compiler, grammar, text):
                self.wrong.append(f"{name}: {text}")
        for seed in range(_TEXTS):
            try:
                text = random_text(compiler, grammar, seed)
            except AssertionError:
                self.counts["texts without an end"] += 1
                continue
            self.counts["texts"] += 1
            if not validator.is_valid(json.loads(text)):
                self.wrong.append(f"{name}: {text}")


def _folder(variable: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} is not set")
    return Path(folder)


def _groups(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted([*folder.glob("*.json"), *folder.glob("optional/format/*.json")]):
        if file.stem not in _LEFT_OUT:
            yield from ((file, group) for group in json.loads(file.read_text()))


@pytest.mark.parametrize("draft", _DRAFTS)
def test_the_official_suite(draft: str) -> None:
    folder = _folder("JSON_SCHEMA_TEST_SUITE") / draft
    tally = Tally()
    kind, address = _DRAFTS[draft]
    for file, group in _groups(folder):
        schema = group["schema"]
        if address is not None and isinstance(schema, dict):
            schema = {"$schema": address, **schema}
        validator = kind(schema, format_checker=FORMATS if "format" in file.parts else None)
        tally.take(schema, group["tests"], validator, f"{file.name}: {group['description']}")
    print(draft, dict(tally.counts))
    assert not tally.wrong
    assert tally.counts["enforced"] > 4 * tally.counts["refused"]


def test_schemas_of_the_benchmark() -> None:
    files = sorted(_folder("JSON_SCHEMA_BENCH").rglob("*.json"))
    tally = Tally()
    for file in random.Random(7).sample(files, min(_SAMPLE, len(files))):
        content = json.loads(file.read_text())
        whole = isinstance(content, dict) and "schema" in content and "tests" in content
        schema, tests = (content["schema"], content["tests"]) if whole else (content, [])
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        tally.take(schema, tests, kind(schema, format_checker=FORMATS), file.name)
    print(dict(tally.counts))
    assert not tally.wrong
    assert tally.counts["enforced"] > 9 * tally.counts["refused"]
