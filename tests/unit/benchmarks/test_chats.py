"""Chats on real servers: what is measured when one is killed, or when two share the chats."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tgi_server import demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def measured(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.chats", *arguments, f"--start={demo_model.PATH}", "--new-tokens=8"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])[arguments[0]]


def test_a_prompt_is_read_after_a_kill_and_computed_without_files() -> None:
    before, after, without = measured("restart", "--words=150")
    assert [each["equal"] for each in (before, after, without)] == [True] * 3
    assert (before["cached_tokens"], without["cached_tokens"]) == (0, 0)
    assert after["cached_tokens"] >= 128


def test_affinity_finds_more_in_caches_than_turns_and_a_stalled_replica_makes_no_call_late() -> None:
    flags = "--chats=6", "--turns=3", "--users=3", "--words=60", "--turn-words=20"
    one, blind, affinity, stalled = measured("replicas", *flags)
    assert [len(each["latencies"]) for each in (one, blind, affinity, stalled)] == [18] * 4
    assert [each["late"] for each in (one, blind, affinity, stalled)] == [0] * 4
    assert blind["cached_share"] < affinity["cached_share"]
    assert affinity["cached_share"] > 0.9 * one["cached_share"]
