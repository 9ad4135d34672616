"""Loads: numbers of users, and lengths of their prompts and of the replies."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from benchmarks.words import shuffled_chain, text

GREETING = "Hello World, what is your name dog?"
# Tokens of prompts and of replies in the loads of vllm-cpu-perf-eval, and tokens of a word.
_PUBLIC = ((512, 512), (7680, 512), (1024, 1024), (2048, 256), (256, 2048))
_WORD_TOKENS = 1.12
_CHANGEABLE = ("users", "words", "new_tokens", "turns", "repeat", "stream", "adapters")


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: each user sends the next request as soon as the last reply is complete.

    words: of a prompt, or of each turn of a chat; every one is different. None: all prompts are the greeting.
    new_tokens: of every reply; the end-of-sequence token is ignored. turns: more than 1 makes it a chat, in which the
    history is sent along. repeat: prompts, or whole chats, that each user sends. stream: token by token.
    copied: a model that copies repeats pieces of the prompt in its reply. adapters: that the users name, each the same
    one in all its requests; 0: none. sampled: temperature 0.7 and top_p 0.9 instead of greedy decoding,
    and top_k where there is one. public: of a suite that others publish.
    """

    name: str
    users: int
    words: int | None
    new_tokens: int
    turns: int = 1
    repeat: int = 3
    stream: bool = True
    copied: bool = False
    adapters: int = 0
    sampled: bool = False
    top_k: int | None = None
    public: bool = False

    def describe(self) -> str:
        users = f"{self.users} user{'s' * (self.users > 1)}"
        prompt = "the greeting" if self.words is None else f"{self.words} words"
        adapters = f", {self.adapters} adapters" if self.adapters else ""
        turns = f"{self.turns} turns, " if self.turns > 1 else ""
        sampled = f", sampled{f' with top_k {self.top_k}' if self.top_k else ''}" if self.sampled else ""
        options = f"{', streamed' if self.stream else ''}{sampled}{adapters}"
        return f"{users}, {turns}{prompt}, {self.new_tokens} new tokens{options}"

    @property
    def requests(self) -> int:
        return self.users * self.repeat * self.turns

    @property
    def length(self) -> int:
        """The tokens of a request with its reply, at most, by an estimate."""
        words = len(GREETING.split()) if self.words is None else self.words
        return int(self.turns * (1.1 * _WORD_TOKENS * words + self.new_tokens)) + 64

    @property
    def usual(self) -> bool:
        """True for a load that is measured unless others are requested."""
        return not (self.copied or self.adapters or self.sampled or self.public)

    def adapter(self, user: int) -> str | None:
        """Returns the name of a user's adapter; None for the model itself."""
        return adapter_name(user % self.adapters) if self.adapters else None

    def prompts(self, seed: int, user: int) -> Iterator[list[str]]:
        """Yields, for each prompt or chat of a user, the texts of its turns. The same seed gives the same texts.

        Every load has texts of its own: otherwise a prefix cache knows prompts from the load before.
        """
        for index in range(self.repeat):
            random = Random(f"{self.name}/{seed}/{user}/{index}")
            write = shuffled_chain if self.copied else text
            yield [GREETING if self.words is None else write(random, self.words) for _ in range(self.turns)]


_LOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", users=40, words=None, new_tokens=10, repeat=20, stream=False),
        Workload("W2", users=1, words=None, new_tokens=64, repeat=6),
        Workload("W3", users=8, words=64, new_tokens=64, repeat=4),
        Workload("W4", users=32, words=64, new_tokens=64, repeat=3),
        Workload("W5", users=8, words=700, new_tokens=16, repeat=3),
        Workload("W6", users=16, words=64, new_tokens=64, turns=5, repeat=1),
        Workload("W7", users=32, words=64, new_tokens=64, repeat=3, adapters=8),
        Workload("W8", users=1, words=300, new_tokens=128, repeat=4, copied=True),
    )
}
WORKLOADS = _LOADS | {
    f"{name}{end}": replace(_LOADS[name], name=f"{name}{end}", sampled=True, top_k=top_k)
    for end, top_k in (("s", None), ("k", 50))
    for name in ("W2", "W3", "W4")
}
for _prompt, _reply in _PUBLIC:
    _load = Workload(f"{_prompt}/{_reply}", 32, round(_prompt / _WORD_TOKENS), _reply, repeat=1, public=True)
    _short = replace(_load, name=f"{_load.name}-short", users=4, new_tokens=_reply // 8)
    WORKLOADS |= {_load.name: _load, _short.name: _short}


def adapter_name(number: int) -> str:
    return f"adapter-{number}"


def add_load_arguments(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """Adds the flags that choose loads and change them, the same ones for every command."""
    loads = parser.add_argument_group("loads", "; ".join(f"{w.name}: {w.describe()}" for w in WORKLOADS.values()))
    loads.add_argument("--load", nargs="+", default=default, choices=WORKLOADS, help=f"default: {' '.join(default)}")
    loads.add_argument(
        "--users", type=positive, help="users at once; this and the following flags replace the load's own values"
    )
    loads.add_argument("--words", type=positive, help="words of a prompt, or of a turn of a chat")
    loads.add_argument("--new-tokens", type=positive, help="tokens of a reply")
    loads.add_argument("--turns", type=positive, help="turns of a chat; 1: single prompts")
    loads.add_argument("--repeat", type=positive, help="prompts, or chats, of each user")
    loads.add_argument("--adapters", type=int, help="adapters that users name, adapter-0 and so on; 0: none")
    loads.add_argument("--stream", action=argparse.BooleanOptionalAction, help="get replies token by token, or whole")


def chosen_loads(arguments: argparse.Namespace) -> list[Workload]:
    changes = {name: getattr(arguments, name) for name in _CHANGEABLE if getattr(arguments, name) is not None}
    return [replace(WORKLOADS[name], **changes) for name in arguments.load]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
