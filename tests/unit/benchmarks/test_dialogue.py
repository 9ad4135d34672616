"""The recorded dialogue, and what is measured while it is played."""

import json
import subprocess
import sys

import pytest

from benchmarks.dialogue import RECORDED, Measured, conversations
from tests.servers import TextGenerationServer


def test_sessions_have_only_the_rules_in_common() -> None:
    recorded = json.loads(RECORDED.read_text())
    turns = [list(conversations(recorded, session)) for session in (1, 2)]
    for number, ((first, words), (second, _)) in enumerate(zip(*turns, strict=True)):
        assert [each["role"] for each in first] == ["system", *["user", "assistant"] * number]
        assert words
        known = [messages[0]["content"] for messages in (first, second)]
        common = next(place for place, (a, b) in enumerate(zip(*known, strict=True)) if a != b)
        assert common == len(recorded["rules"]) + len("\nThis is kitchen ")


def test_tokens_of_streams_count_while_sessions_run() -> None:
    measured = Measured(warm=True, spans=[(1.0, 2.0), (4.0, 5.0)])
    measured.add_stream([0.5, 1.0, 1.25, 2.0, 3.0, 4.5])
    assert (measured.stream_tokens, measured.gaps, measured.stream_tokens_per_s) == (4, [0.25, 0.75], 2.0)


@pytest.mark.slow
def test_a_warm_prompt_leaves_little_to_compute(demo_server: TextGenerationServer) -> None:
    command = ["--url", demo_server.url, "--sessions", "1", "--streams", "1", "--pause", "0"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.dialogue", *command], stdout=subprocess.PIPE, check=True)
    cold, warm = json.loads(done.stdout.splitlines()[-1])
    assert len(cold["first_tokens"]) == len(warm["first_tokens"]) == 6
    computed = [sum(tokens for _, tokens in each["prompts"]) for each in (cold, warm)]
    assert computed[1] < computed[0]
