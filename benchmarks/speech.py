"""A recorded dialogue, word by word: when its words come, and what has been said by then."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.api import ChatMessage

RECORDED = Path(__file__).with_name("dialogue.json")
# English at the pace of a conversation.
_WORDS_PER_SECOND = 2.5
# Of a pause within a turn, beside the time of a word: shorter than the silence that ends a turn.
_BREAK_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of speech, in words a second, and after how many of them a prompt is warmed, if it is.

    break_seconds: of a pause within a turn. notice, silence: seconds without a word after which an early answer is
    requested, and the turn is over. pause: seconds from there to the first word of the next turn, unless the answer
    takes longer.
    """

    words_per_second: float
    warm_every: int
    break_seconds: float
    notice: float
    silence: float
    pause: float
    new_tokens: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Pace":
        """Returns the pace that is asked for: `--speed` times that of a conversation."""
        speed = arguments.speed
        return cls(
            _WORDS_PER_SECOND * speed,
            arguments.warm_every,
            break_seconds=_BREAK_SECONDS / speed,
            notice=arguments.notice / speed,
            silence=arguments.silence / speed,
            pause=arguments.pause,
            new_tokens=arguments.tokens,
        )

    def moments(self, turn: "SpokenTurn") -> list[float]:
        """Returns when each word of a turn has come, in seconds from its beginning, and when the turn is over."""
        breaks = (sum(each < word for each in turn.pauses) for word in range(1, len(turn.words) + 1))
        words = [word / self.words_per_second + self.break_seconds * some for word, some in enumerate(breaks, 1)]
        return [*words, words[-1] + self.silence]


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """The messages before a turn, and its words. pauses: after how many words the user pauses."""

    messages: list[ChatMessage]
    words: list[str]
    pauses: list[int]

    def said(self, words: int) -> list[ChatMessage]:
        """Returns the messages up to the first words of the turn."""
        return [*self.messages, {"role": "user", "content": " ".join(self.words[:words])}]


def conversations(recorded: dict[str, Any], session: int) -> Iterator[SpokenTurn]:
    """Yields the turns of a session. Other sessions have only the rules in common with it."""
    history: list[ChatMessage] = []
    for turn in recorded["turns"]:
        known = f"{recorded['rules']}\nThis is kitchen {session}. {recorded['task']} {turn['state']}"
        yield SpokenTurn([{"role": "system", "content": known}, *history], turn["user"].split(), turn["pauses"])
        history.append({"role": "user", "content": turn["user"]})
        history.append({"role": "assistant", "content": turn["assistant"]})
