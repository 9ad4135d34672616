"""`oatmill chat`: a conversation with a server, in the terminal, with answers as they are generated."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import httpx2

from oatmill.server_client import DEFAULT_URL, NotAnswered, Refused, client_of, opened, refusal
from tgi_server import demo_model

_DIM, _PLAIN = "\033[2m", "\033[0m"
_HINT: Final = "/clear forgets the conversation, /bye or Ctrl-D ends it, Ctrl-C stops an answer"
_DEMO_HINT: Final = (
    "this is the bundled demo model: 3.5 million parameters that know a little of cooking and DIY; "
    f"`oatmill serve OWNER/MODEL` serves a real one\ntry: {'  '.join(demo_model.EXAMPLES)}"
)
_ENDS: Final = ("/bye", "/quit", "/exit")

Message = dict[str, str]


def main(arguments: Sequence[str]) -> int:
    """Chats until the input ends. Returns 0; 1 if the first question was not answered, 2 after wrong usage."""
    parser = argparse.ArgumentParser(prog="oatmill chat", description="Chats with a server in this terminal.")
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, help=f"the server's URL, or its port (default: {DEFAULT_URL})"
    )
    parser.add_argument("--model", default="tgi", help="a name that /v1/models lists (default: the served model)")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--max-tokens", type=int, help="maximum number of tokens of an answer (default: the server's)")
    parser.add_argument("--temperature", type=float, help="0: the most likely answer (default: the server's)")
    options = parser.parse_args(arguments)
    beginning = [{"role": "system", "content": options.system}] if options.system else []
    given = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    settings = {"model": options.model, **{name: value for name, value in given.items() if value is not None}}
    with client_of(options.url) as client:
        return _converse(client, beginning, settings, interactive=sys.stdin.isatty())


def _converse(client: httpx2.Client, beginning: list[Message], settings: dict[str, Any], *, interactive: bool) -> int:
    if interactive:
        import readline  # noqa: F401  # gives input() a history and keys for editing

        try:
            print(_hints(client))
        except NotAnswered as error:
            print(f"oatmill chat: {error}", file=sys.stderr)
            return 1
    messages, answered = list(beginning), False
    while True:
        try:
            question = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if question in _ENDS:
            return 0
        if question == "/clear":
            messages = list(beginning)
        if not question or question.startswith("/clear"):
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            answer = _print_answer(_stream(client, {**settings, "messages": asked}))
        except NotAnswered as error:
            print(f"oatmill chat: {error}", file=sys.stderr)
            if not answered:
                return 1
            continue
        answered = True
        messages = [*asked, {"role": "assistant", "content": answer}]


def _print_answer(pieces: Iterator[Message]) -> str:
    """Prints reasoning, dimmed, and text as they come, until Ctrl-C. Returns the text."""
    text, dim = "", False
    colours = sys.stdout.isatty()
    try:
        for piece in pieces:
            thought, said = piece.get("reasoning_content") or "", piece.get("content") or ""
            if colours and bool(thought) != dim and (thought or said):
                dim = bool(thought)
                print(_DIM if dim else f"{_PLAIN}\n", end="")
            print(f"{thought}{said}", end="", flush=True)
            text += said
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        print(_PLAIN if colours else "")
    return text


def _hints(client: httpx2.Client) -> str:
    """Returns hints to show before the first question, once the server has loaded its model. Raises NotAnswered."""
    with contextlib.suppress(Refused), opened(client, "GET", "/info") as response:  # which other servers do not have
        if demo_model.NAME in response.read().decode(errors="replace"):
            return f"{_HINT}\n{_DEMO_HINT}"
    return _HINT


def _stream(client: httpx2.Client, body: dict[str, Any]) -> Iterator[Message]:
    """Yields the deltas of an answer, once the server has loaded its model. Raises NotAnswered."""
    with opened(client, "POST", "/v1/chat/completions", {**body, "stream": True}) as response:
        yield from _deltas(response)


def _deltas(response: httpx2.Response) -> Iterator[Message]:
    for line in response.iter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise NotAnswered(refusal(response.status_code, data))
            yield from (choice["delta"] for choice in event.get("choices", ()))
