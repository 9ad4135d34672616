"""The examples of docs/structured.md, as they stand, against the demo model."""

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.servers import TextGenerationServer

DOCUMENT = Path(__file__).parents[3] / "docs" / "structured.md"
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ADDRESS = "http://127.0.0.1:8080"
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


def examples(language: str) -> list[tuple[str, str]]:
    """The section and the code of each block."""
    text = DOCUMENT.read_text()
    return [
        (_SECTION.findall(text[: block.start()])[-1:][0] if _SECTION.search(text[: block.start()]) else "", block[2])
        for block in _BLOCK.finditer(text)
        if block[1] == language
    ]


def test_the_python_examples_run(demo_server: TextGenerationServer) -> None:
    names: dict[str, object] = {}
    printed = {}
    for section, code in examples("python"):
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                exec(compile(code.replace(_ADDRESS, demo_server.url), section or "imports", "exec"), names)
        except Exception as error:
            pytest.fail(f"{section}: {error!r} after {output.getvalue()!r}")
        printed[section] = output.getvalue()
    assert len(printed) >= 9
    assert all(text.strip() for section, text in printed.items() if section)


def test_the_shell_examples_run(demo_server: TextGenerationServer) -> None:
    ((_, code),) = examples("sh")
    command = code.replace(_ADDRESS, demo_server.url)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(json.loads(result.stdout)["generated_text"])
    assert isinstance(answer["vegetarian"], bool)
    assert 5 <= answer["minutes"] <= 240
