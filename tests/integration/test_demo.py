"""The main job, as a newcomer runs it."""

import os
import re
import subprocess
import sys
import uuid

import psutil
import pytest

from oatmill import demo

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


class Clock:
    """A clock that advances only in `sleep`, by a minute each time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, _: float) -> None:
        self.seconds += 60


def test_the_demo_waits_for_a_slow_machine_as_long_as_loading_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(demo, "time", clock)
    percents = iter(range(100))
    assert demo.wait_until("it answers", lambda: clock.seconds >= 1200, [], lambda: f"{next(percents)} %") == 1200
    assert "1140 s, 19 %" in capsys.readouterr().out
    with pytest.raises(demo.DemoError, match="no progress within 120 s: waited until it answers"):
        demo.wait_until("it answers", lambda: clock.seconds >= 2400, [], lambda: "19 %")
    assert clock.seconds == 1200 + 180
