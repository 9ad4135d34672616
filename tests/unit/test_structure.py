"""docs/structure.md is true: the files and folders that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r"`([a-z_/]+(?:\.py|\.proto|/))`", (ROOT / "docs" / "structure.md").read_text())))
PATHS = [
    f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}"
    for package in ("llm_functionalities", "proto", "shared", "tgi_server")
    for path in (ROOT / package, *(ROOT / package).rglob("*"))
]


def test_the_page_names_files():
    assert len(NAMES) > 50


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_the_page_names_is_there(name: str):
    assert any(path.endswith(f"/{name}") for path in PATHS)
