"""`text-generation-server` on the command line: one clear line and the right exit code for a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_llama
from tgi_server.engine import Engine, EngineConfig

USAGE, FAILED = 2, 1


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tgi_server.shard.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("quantize", "model", "folder", "--bits=5"), "--bits (or BITS): Input should be 4 or 8"),
    ],
)
def test_a_mistake_gets_one_clear_line(arguments: tuple[str, ...], expected: str) -> None:
    result = run(*arguments)
    assert result.returncode == USAGE
    assert expected in result.stderr.splitlines()[0]
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_here_is_not_fetched_behind_ones_back(tmp_path: Path) -> None:
    result = run("serve", "maker/tiny", HF_HOME=str(tmp_path))
    assert result.returncode == FAILED
    assert result.stderr.splitlines()[-1] == (
        "shard-0: maker/tiny is not complete on this machine; run `text-generation-server download-weights` first"
    )


@pytest.mark.parametrize(("flags", "environment"), [(["--bits=8"], {}), ([], {"BITS": "4"})])
def test_numbers_to_choose_from_may_be_chosen(flags: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    result = run("quantize", str(tmp_path / "absent"), str(tmp_path / "target"), *flags, **environment)
    assert result.returncode == FAILED
    assert "absent" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_quantize_writes_a_model_that_is_served_as_gptq(tmp_path: Path) -> None:
    source, target, text = make_llama(tmp_path / "source"), tmp_path / "target", tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"Plant {number} trees in rows."}) + "\n" for number in range(400)))
    flags = ("--groupsize=32", "--samples=8", "--length=64", "--act-order", "--bits=4", f"--calibration={text}")
    result = run("quantize", str(source), str(target), *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{target}\n"
    assert Engine(EngineConfig(target)).info.quantization == "GPTQ, 4 bits, groups of 32, act-order"
    text.write_text("{}\n")
    result = run("quantize", str(source), str(tmp_path / "other"), f"--calibration={text}")
    assert result.returncode == FAILED
    assert result.stderr.splitlines()[-1].endswith(f"{text}, line 1: a JSON object with `text` is expected")
