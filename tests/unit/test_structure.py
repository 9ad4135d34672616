"""The documents are true: files and folders that docs/structure.md names are there, and tables of files are whole."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r"`([a-z_/]+(?:\.py|\.proto|/))`", (ROOT / "docs" / "structure.md").read_text())))
PATHS = [
    f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}"
    for package in ("llm_functionalities", "oatmill", "proto", "shared", "tgi_server")
    for path in (ROOT / package, *(ROOT / package).rglob("*"))
]


def test_the_page_names_files():
    assert len(NAMES) > 50


def test_every_file_is_named_or_in_a_folder_whose_files_name_themselves():
    page, *others = (
        (ROOT / "docs" / f"{name}.md").read_text() for name in ("structure", "engine", "sampling", "scheduling")
    )
    (folders,) = re.findall(r"In these folders each file is one of a kind(.+?)\n\n", page, re.DOTALL)
    named = {name.rpartition("/")[2] for text in (page, *others) for name in re.findall(r"`([\w/]+\.py)`", text)}
    one_of_a_kind = tuple(f"/{folder}{{}}" for folder in re.findall(r"`([\w/]+/)`", folders))
    missing = [
        path
        for path in PATHS
        if path.endswith(".py")
        and (name := path.rpartition("/")[2]) not in named | {"__init__.py", "__main__.py", "cli.py"}
        and not path.endswith(tuple(folder.format(name) for folder in one_of_a_kind))
        and "/stubs/" not in path
    ]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_the_page_names_is_there(name: str):
    assert any(path.endswith(f"/{name}") for path in PATHS)


@pytest.mark.parametrize(
    ("page", "folder"),
    [
        ("engine.md", "tgi_server/engine"),
        ("sampling.md", "tgi_server/engine/sampling"),
        ("scheduling.md", "tgi_server/router/scheduling"),
    ],
)
def test_a_table_of_files_names_each_of_the_folder(page: str, folder: str):
    text = (ROOT / "docs" / page).read_text()
    (rows,) = re.findall(r"\| file \| what it contains \|\n\|[-|]+\|\n((?:\|.+\n)+)", text)
    named = [name.rstrip("/") for row in rows.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    there = [path.name for path in (ROOT / folder).iterdir() if not path.name.startswith("__")]
    assert sorted(named) == sorted(there)


def test_what_shows_the_promises_of_security_is_there():
    page = (ROOT / "SECURITY.md").read_text()
    promised, shown = (
        re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE)
        for rows in re.findall(r"\| promise \| [a-z ]+ \|\n\|[-|]+\|\n((?:\|.+\n)+)", page)
    )
    assert shown == promised


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: page.stem)
def test_tests_that_a_page_names_are_there(page: Path):
    assert [
        path for path in re.findall(r"`(tests/[\w/]+\.\w+)`", page.read_text()) if not (ROOT / path).is_file()
    ] == []


def test_the_spine_can_be_read_in_an_evening():
    page = (ROOT / "docs" / "spine.md").read_text()
    files = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    lines = sum(len((ROOT / "tgi_server" / file).read_text().splitlines()) for file in files)
    assert len(set(files)) == len(files) <= 20
    assert lines <= 3500


def test_the_answers_to_the_ten_questions_are_on_the_spine():
    page = (ROOT / "docs" / "spine.md").read_text()
    files = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    answers = re.findall(r"^\| \d+ \|.*\| `(\w+)` in `([^`]+)` \|", page, re.MULTILINE)
    assert len(answers) == 10
    for name, file in answers:
        assert file in files
        assert re.search(
            rf"^ *(?:async def|def|class) {name}\b", (ROOT / "tgi_server" / file).read_text(), re.MULTILINE
        ), name
