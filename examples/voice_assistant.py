"""A voice assistant's loop: what was said goes in line by line, and sentences come out as soon as they are whole.

    python examples/voice_assistant.py [URL]

A reply that is not there in time is of no use to a listener, so each has a deadline.
"""

import re
import sys
from collections.abc import Iterator

from openai import APIStatusError, OpenAI

DEADLINE_MS = 10_000
SENTENCE = re.compile(r"(.+?[.!?])\s+", re.DOTALL)


def sentences(pieces: Iterator[str]) -> Iterator[str]:
    """Yields each sentence once it is whole, and the rest at the end."""
    text = ""
    for piece in pieces:
        text += piece
        while found := SENTENCE.match(text):
            yield found[1]
            text = text[found.end() :]
    if text.strip():
        yield text.strip()


def reply(client: OpenAI, conversation: list[dict[str, str]]) -> Iterator[str]:
    stream = client.chat.completions.create(
        model="tgi", messages=conversation, max_tokens=150, stream=True, extra_body={"timeout_ms": DEADLINE_MS}
    )
    return (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def main() -> None:
    client = OpenAI(base_url=f"{(sys.argv[1:] or ['http://127.0.0.1:8080'])[0]}/v1", api_key="unused", max_retries=0)
    conversation: list[dict[str, str]] = []
    for heard in sys.stdin:
        conversation.append({"role": "user", "content": heard.strip()})
        spoken = []
        try:
            for sentence in sentences(reply(client, conversation)):
                print(f"says: {sentence}", flush=True)
                spoken.append(sentence)
        except APIStatusError as error:
            print(f"says: One moment, please. ({error.status_code})", flush=True)
        conversation.append({"role": "assistant", "content": " ".join(spoken)})


if __name__ == "__main__":
    main()
