"""The main job, as a newcomer runs it."""

import os
import re
import subprocess
import sys
import uuid

import psutil

STAGES = ("starting", "loading", "ready", "stopping", "stopped")


def processes_of(run: str) -> list[psutil.Process]:
    """Returns the processes that have inherited the mark `run` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DEMO_RUN") == run:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_demo_shows_real_answers_and_leaves_nothing_running() -> None:
    run = uuid.uuid4().hex
    result = subprocess.run(
        [sys.executable, "-m", "oatmill", "demo"],
        env={**os.environ, "DEMO_RUN": run},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    answers = re.findall(r"^  answer: (.*)$", result.stdout, re.MULTILINE)
    assert len(answers) == 6
    assert answers[0] == "(empty)"
    assert all(len(answer.split()) > 2 for answer in answers[1:])
    assert len(re.findall(r"^  \d+ ms$", result.stdout, re.MULTILINE)) == 3
    assert [stage for stage in STAGES if not re.search(f"^{stage}", result.stdout, re.MULTILINE)] == []
    assert not result.stderr
    assert not processes_of(run)
