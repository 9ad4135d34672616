"""`text-generation-server` on the command line: one clear line and the right exit code for a mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

USAGE, FAILED = 2, 1


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tgi_server.shard.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("quantize", "model", "folder"), "quantising a model is not supported yet"),
        (("serve", "--lora-adapters=one"), "--lora-adapters (or LORA_ADAPTERS): adapters are not supported yet"),
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
