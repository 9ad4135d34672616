"""Flags that choose loads and change them, the same for every command."""

import argparse
from dataclasses import replace

from benchmarks.workloads import WORKLOADS, Workload

_CHANGEABLE = ("users", "words", "new_tokens", "turns", "repeat", "stream")


def add_load_arguments(parser: argparse.ArgumentParser, default: list[str]) -> None:
    loads = parser.add_argument_group("loads", "; ".join(f"{w.name}: {w.describe()}" for w in WORKLOADS.values()))
    loads.add_argument("--load", nargs="+", default=default, choices=WORKLOADS, help=f"default: {' '.join(default)}")
    loads.add_argument("--users", type=_positive, help="this and the following instead of the load's own")
    loads.add_argument("--words", type=_positive, help="of a prompt, or of a turn of a chat")
    loads.add_argument("--new-tokens", type=_positive, help="of a reply")
    loads.add_argument("--turns", type=_positive, help="of a chat; 1: single prompts")
    loads.add_argument("--repeat", type=_positive, help="prompts, or chats, of each user")
    loads.add_argument("--stream", action=argparse.BooleanOptionalAction, help="whether replies come token by token")


def chosen_loads(arguments: argparse.Namespace) -> list[Workload]:
    changes = {name: getattr(arguments, name) for name in _CHANGEABLE if getattr(arguments, name) is not None}
    return [replace(WORKLOADS[name], **changes) for name in arguments.load]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
