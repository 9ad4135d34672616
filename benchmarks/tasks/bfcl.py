"""A hundred cases of the Berkeley Function Calling Leaderboard (Apache 2.0), from the package `bfcl-eval`.

The data is read from the package, installed or as a wheel, and is not part of this repository. Cases of four
categories are taken at equal distances. Answers are compared by rules of our own, so scores are not those of the
leaderboard.
"""

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.tasks.calls import tool_of, valid_calls
from benchmarks.tasks.case import CHAT, TaskAnswer, TaskCase, TaskVerdict, chat, matches

_CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
_OF_EACH = 25
_MAX_TOKENS = 300
# Names of Python's types in the data, where they differ from JSON Schema's.
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}

DataFolder = Path | zipfile.Path


def data_folder(package: Path | None) -> DataFolder | None:
    """Returns the folder with the data: in a wheel or a folder of the package, or in the installed one.

    None if the package is not installed. Raises ValueError if there is no data in `package`.
    """
    if package is None:
        spec = find_spec("bfcl_eval")
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(spec.submodule_search_locations[0]) / "data"
    root: DataFolder = zipfile.Path(package) if zipfile.is_zipfile(package) else package
    for folder in (root / "bfcl_eval" / "data", root / "data"):
        if folder.is_dir():
            return folder
    raise ValueError(f"{package} is not a wheel or a folder of bfcl-eval; `pip download --no-deps bfcl-eval` gets one")


def cases(folder: DataFolder) -> list[TaskCase]:
    return [each for category in _CATEGORIES for each in _cases_of(folder, category)]


def _cases_of(folder: DataFolder, category: str) -> list[TaskCase]:
    name = f"BFCL_v4_{category}.json"
    questions = _lines(folder / name)
    answers = (
        {} if category == "irrelevance" else {each["id"]: each for each in _lines(folder / "possible_answer" / name)}
    )
    chosen = questions[:: len(questions) // _OF_EACH][:_OF_EACH]
    return [_case(category, each, answers.get(each["id"], {}).get("ground_truth", [])) for each in chosen]


def _lines(file: DataFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _case(category: str, question: Mapping[str, Any], truth: Sequence[Mapping[str, Any]]) -> TaskCase:
    tools = [
        tool_of(openai_name(each["name"]), each["description"], schema_of(each["parameters"]))
        for each in question["function"]
    ]
    expected = [
        {"name": openai_name(name), "arguments": {key: _accepted(values) for key, values in arguments.items()}}
        for call in truth
        for name, arguments in call.items()
    ]

    def score(answer: TaskAnswer) -> TaskVerdict:
        valid = valid_calls(answer, tools)
        if valid is False:
            return TaskVerdict(0.0, valid)
        got = [{"name": each.name, "arguments": json.loads(each.arguments)} for each in answer.calls]
        return TaskVerdict(float(matches(expected, got)), valid)

    body = chat(question["question"][0], _MAX_TOKENS, tools=tools, tool_choice="auto")
    return TaskCase(f"bfcl: {category}", question["id"], CHAT, body, score)


def openai_name(name: str) -> str:
    """Returns a function's name without characters that OpenAI's interface does not allow."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def schema_of(value: Any) -> Any:
    """Returns parameters as a JSON schema; the data has Python's names of types."""
    if isinstance(value, list):
        return [schema_of(each) for each in value]
    if not isinstance(value, dict):
        return value
    schema = {key: schema_of(each) for key, each in value.items() if (key, type(each)) != ("optional", bool)}
    if isinstance(kind := value.get("type"), str):
        if kind == "any":
            del schema["type"]
        else:
            schema["type"] = _TYPES.get(kind, kind)
    return schema


def _accepted(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Returns right values of an argument as `matches` takes them; an empty text says that it may be missing."""
    return {"any": [None if each == "" else _inner(each) for each in values] + ([""] if "" in values else [])}


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _accepted(each) if isinstance(each, list) else each for key, each in value.items()}
    return [_inner(each) for each in value] if isinstance(value, list) else value
