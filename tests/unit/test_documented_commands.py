"""Commands of the documents are run or marked, those for users of other servers are understood, and links work."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from shared.foreign_flags import FOREIGN_FLAGS, named_flags
from shared.settings import read_settings
from tests.documents import PAGES, shell_blocks
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
LINKING = [
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


@pytest.mark.parametrize(("foreign", "answer"), FOREIGN_FLAGS.items())
def test_flags_of_other_servers_are_refused_with_what_to_do(
    foreign: str, answer: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "oatmill serve", ["--port=80", foreign, "2", "--swap-space=4"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"oatmill serve: there is no {foreign} here; {answer}"
    assert len(lines) == (1 if foreign == "--swap-space" else 2)


@pytest.mark.parametrize("name", ["vllm", "ollama"])
def test_pages_for_users_of_other_servers_agree_with_what_errors_say(name: str):
    rows = [
        [[*re.findall(r"`(-[^ `]+)", cell)] for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / f"coming-from-{name}.md").read_text().splitlines()
        if line.startswith("|")
    ]
    compared = 0
    for *theirs, ours in rows:
        for flag in FOREIGN_FLAGS.keys() & {flag for cell in theirs for flag in cell}:
            named = named_flags(FOREIGN_FLAGS[flag])
            assert not named or set(named) & set(ours), flag
            compared += 1
    assert compared > 15


def test_a_program_gives_no_answer_with_a_flag_that_it_lacks(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_settings(DownloadSettings, "text-generation-server download-weights", ["--host=x", "--seed=3"])
    program = "text-generation-server download-weights"
    assert capsys.readouterr().err == f"{program}: there is no --seed here; {FOREIGN_FLAGS['--seed']}\n"


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("--dtype auto", "dtype", None),
        ("--dtype half", "dtype", "float16"),
        ("--kv-cache-dtype auto", "kv_cache_dtype", None),
        ("--kv-cache-dtype fp8", "kv_cache_dtype", "fp8_e4m3fn"),
        ("--generation-config vllm", "generation_config", "none"),
        ("--enable-auto-tool-choice --tool-call-parser openai", "tool_call_parser", "harmony"),
        ("--enable-auto-tool-choice --tool-call-parser hermes", "tool_call_parser", "hermes"),
    ],
)
def test_values_of_vllm_mean_what_they_mean_there(arguments: str, name: str, value: str | None):
    assert getattr(read_settings(LauncherSettings, "oatmill serve", arguments.split()), name) == value


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (
            "--no-enable-auto-tool-choice",
            "--enable-auto-tool-choice (or ENABLE_AUTO_TOOL_CHOICE): tools that a request",
        ),
        ("--tool-call-parser step3", "--tool-call-parser (or TOOL_CALL_PARSER): Input should be 'auto', "),
        ("--kv-cache-dtype int8", "--kv-cache-dtype (or KV_CACHE_DTYPE): Input should be 'fp8_e4m3fn' or 'fp8_e5m2'"),
    ],
)
def test_values_that_mean_something_else_are_refused(arguments: str, refusal: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "oatmill serve", arguments.split())
    assert capsys.readouterr().err.startswith(f"oatmill serve: {refusal}")


def test_a_model_without_a_flag_is_refused_with_the_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_settings(LauncherSettings, "oatmill serve", ["--port=3", "OWNER/MODEL"])
    assert capsys.readouterr().err.endswith("OWNER/MODEL; did you mean --model-id OWNER/MODEL?\n")


# What stands for a user's own model, file or machine.
EXAMPLE = re.compile(r"\b(OWNER|MODEL|FOLDER|REGISTRY|M)\b|/models/|\.\.\.|\b10\.0\.0\.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_run_or_marked(page: Path):
    for block in shell_blocks(page):
        kind, _, reason = (block.mark or "").partition(": ")
        if kind.startswith("run by "):
            assert page.name in (ROOT / kind.removeprefix("run by ")).read_text(), f"{block}: it is not"
        elif not reason:
            found = EXAMPLE.search(block.text)
            assert not found, f"{block}: {found} cannot be run; put `<!-- not run: REASON -->` above the block"
            assert subprocess.run(["bash", "-n", "-c", block.text], check=False).returncode == 0, (
                f"{block}: no commands"
            )


def test_blocks_of_commands_are_found_with_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.documents.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n    oatmill serve\n\n<!-- not run: needs a GPU -->\n\n    make demo\n\n    make test\n\n"
        "```python\nimport oatmill\n```\n\n<!-- run by tests/x.py -->\n```sh\ncurl localhost:8080\n```\n\n"
        "```\na line of the log\n```\n"
    )
    assert [(block.line, block.text, block.mark, block.serves) for block in shell_blocks(page)] == [
        (3, "oatmill serve\n", None, True),
        (7, "make demo\n\nmake test\n", "not run: needs a GPU", False),
        (16, "curl localhost:8080\n", "run by tests/x.py", False),
    ]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
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
