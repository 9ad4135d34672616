"""What pages for users of other servers say to type is understood, and links of all documents lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from shared.settings import read_settings
from tgi_server.benchmark.settings import BenchmarkSettings
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.shard.settings import DownloadSettings, QuantizeSettings

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "text-generation-launcher": LauncherSettings,
    "text-generation-server download-weights": DownloadSettings,
    "text-generation-server quantize": QuantizeSettings,
    "text-generation-benchmark": BenchmarkSettings,
}
COMMANDS = [
    (program, line.removeprefix(program))
    for line in (ROOT / "docs" / "coming-from-tgi.md").read_text().splitlines()
    for program in PROGRAMS
    if line.startswith(f"{program} ")
]
PAGES = [
    *(path for folder in ("docs", "deploy", "benchmarks") for path in (ROOT / folder).rglob("*.md")),
    *ROOT.glob("*.md"),
]


@pytest.mark.parametrize(("program", "arguments"), COMMANDS, ids=[program + rest for program, rest in COMMANDS])
def test_the_commands_of_tgi_are_understood(program: str, arguments: str):
    assert read_settings(PROGRAMS[program], program, shlex.split(arguments))


def test_the_flags_that_stand_for_those_of_vllm_exist():
    flags = {f"--{name.replace('_', '-')}" for name in LauncherSettings.model_fields} | {"--no-prefix-caching"}
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (ROOT / "docs" / "coming-from-vllm.md").read_text(), re.MULTILINE)
    ours = {flag for left, right in rows for flag in re.findall(r"--[a-z-]+", left if right == "the same" else right)}
    assert len(ours) > 15
    assert ours <= flags


def test_the_flags_that_stand_for_those_of_llama_cpp_exist():
    flags = {f"--{name.replace('_', '-')}" for name in LauncherSettings.model_fields}
    page = (ROOT / "docs" / "coming-from-ollama.md").read_text().partition("## Flags")[2].partition("## Requests")[0]
    rows = [line.split("|")[3] for line in page.splitlines() if line.startswith("|")]
    ours = {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)} - {"---"}
    assert len(ours) > 10
    assert ours <= flags


@pytest.mark.parametrize(("foreign", "ours"), LauncherSettings.foreign_flags.items())
def test_flags_of_other_servers_are_refused_with_those_that_stand_for_them(
    foreign: str, ours: str, capsys: pytest.CaptureFixture[str]
):
    pages = [(ROOT / "docs" / f"coming-from-{name}.md").read_text() for name in ("vllm", "ollama")]
    rows = [line for page in pages for line in page.splitlines() if re.search(rf"(?<![\w-]){foreign}(?![\w-])", line)]
    assert any(ours in row for row in rows)
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "text-generation-launcher", [foreign, "2"])
    assert re.search(rf"{foreign}( 2)?; did you mean {ours}\?", capsys.readouterr().err)


def test_a_model_without_a_flag_is_refused_with_the_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "oatmill serve", ["--port=3", "OWNER/MODEL"])
    assert capsys.readouterr().err.endswith("OWNER/MODEL; did you mean --model-id OWNER/MODEL?\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if heading and file.suffix == ".md":
            assert heading in {_anchor(line) for line in file.read_text().splitlines() if line.startswith("#")}, target


def _anchor(line: str) -> str:
    """Returns the name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
