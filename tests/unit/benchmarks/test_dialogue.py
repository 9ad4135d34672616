"""The recorded dialogue, and what is measured while it is played."""

import json
import subprocess
import sys

import pytest

from benchmarks.dialogue import Measured, Preparation, first_sentence
from benchmarks.reply import Reply
from benchmarks.speech import RECORDED, Pace, SpokenTurn, conversations
from tests.servers import TextGenerationServer


def test_sessions_have_only_the_rules_in_common() -> None:
    recorded = json.loads(RECORDED.read_text())
    turns = [list(conversations(recorded, session)) for session in (1, 2)]
    for number, (first, second) in enumerate(zip(*turns, strict=True)):
        assert [each["role"] for each in first.messages] == ["system", *["user", "assistant"] * number]
        assert first.words
        assert all(0 < each < len(first.words) for each in first.pauses)
        known = [turn.messages[0]["content"] for turn in (first, second)]
        common = next(place for place, (a, b) in enumerate(zip(*known, strict=True)) if a != b)
        assert common == len(recorded["rules"]) + len("\nThis is kitchen ")


def test_tokens_of_streams_count_while_sessions_run() -> None:
    measured = Measured(Preparation.PROMPT, spans=[(1.0, 2.0), (4.0, 5.0)])
    measured.add_stream([0.5, 1.0, 1.25, 2.0, 3.0, 4.5])
    assert (measured.stream_tokens, measured.gaps, measured.stream_tokens_per_s) == (4, [0.25, 0.75], 2.0)


def test_words_come_at_their_pace_and_silence_ends_the_turn() -> None:
    turn = SpokenTurn([], ["yes", "please", "and", "now"], [2])
    pace = Pace(2.0, 3, break_seconds=0.25, notice=0.1, silence=1.0, pause=0.0, new_tokens=4)
    assert pace.moments(turn) == [0.5, 1.0, 1.75, 2.25, 3.25]
    assert turn.said(2) == [{"role": "user", "content": "yes please"}]


def test_the_first_sentence_of_an_answer() -> None:
    assert first_sentence(["Rinse", " it", ".", " Then", "."]) == 3
    assert first_sentence(["Rinse", " it"]) == 2
    measured = Measured(Preparation.ANSWER)
    reply = Reply("Yes. No", 3, 10, 8, [1.0, 1.5, 3.0], ["Yes", ". ", "No"])
    measured.add_reply(reply, said=0.5)
    assert (measured.first_tokens, measured.sentences, measured.prompts) == ([0.5], [1.0], [(10, 2)])


@pytest.mark.slow
def test_prepared_turns_leave_little_to_compute(demo_server: TextGenerationServer) -> None:
    command = ["--url", demo_server.url, "--sessions", "1", "--streams", "1", "--pause", "0"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.dialogue", *command], stdout=subprocess.PIPE, check=True)
    kinds = json.loads(done.stdout.splitlines()[-1])
    assert [len(each["first_tokens"]) for each in kinds] == [6, 6, 6]
    cold, warm, early = [sum(tokens for _, tokens in each["prompts"]) for each in kinds]
    assert early < warm < cold
