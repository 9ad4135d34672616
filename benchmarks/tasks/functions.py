"""Small functions of Python, which are run against tests: in a process of its own, within limits of time and memory."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.tasks.case import CHAT, TaskAnswer, TaskCase, TaskVerdict, chat, read_data, user

_MAX_TOKENS = 500
_CPU_SECONDS, _SECONDS, _MEMORY = 5, 20, 1 << 29
_PASSED = 97
# Reads the function from standard input. Its tests are arguments.
_HARNESS = f"""
import os, resource, sys
for limit, value in (("CPU", {_CPU_SECONDS}), ("AS", {_MEMORY}), ("FSIZE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
names = {{"__name__": "answer"}}
exec(compile(sys.stdin.read(), "answer", "exec"), names)
os._exit({_PASSED} if all([eval(test, names) for test in sys.argv[1:]]) else 1)
"""


def cases() -> list[TaskCase]:
    return [_case(number, each) for number, each in enumerate(read_data("functions")["cases"])]


def _case(number: int, data: Mapping[str, Any]) -> TaskCase:
    asked = f"Write a Python function `{data['signature']}`. {data['task']} TaskAnswer with the code only."

    def score(answer: TaskAnswer) -> TaskVerdict:
        return TaskVerdict(float(passes(code_of(answer.text), data["tests"])))

    return TaskCase("functions", f"functions-{number}", CHAT, chat([user(asked)], _MAX_TOKENS), score)


def code_of(text: str) -> str:
    """Returns the first code block of an answer; the whole answer if it has none."""
    fenced = re.search(r"```[^\n]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return fenced[1] if fenced else text


def passes(code: str, tests: list[str]) -> bool:
    """Returns True if the code runs and all tests, which are expressions, are true."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _HARNESS, *tests],
                input=code.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == _PASSED
