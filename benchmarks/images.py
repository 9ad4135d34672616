"""Measures images in chats: first tokens with new and known images, and text streams beside a queue of images.

    python -m benchmarks.images --start runs/synthetic/smolvlm-500m
    python -m benchmarks.images --start MODEL --peer vllm --peer-programs /opt/peers/vllm/bin --streams 0
    python -m benchmarks.images --url URL              a server that runs

First tokens: one user sends a new photograph, the same conversation again, the same photograph after another text, and
texts of as many tokens. Streams: text streams run all the time. In every second interval users also send photographs,
each the next one as soon as the last reply is complete, and then the same ones again.
"""

import argparse
import asyncio
import base64
import io
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from random import Random

import uvloop
from PIL import Image

from benchmarks.api import ChatMessage, OpenAi
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import stream_texts
from benchmarks.reply import BadReply, Reply, read_reply
from benchmarks.report import finish, number, percentile, table, tell
from benchmarks.serve import first_model
from benchmarks.servers import OURS, PEERS, ServerCommand, ServerDidNotStart, running
from benchmarks.words import COMMON
from benchmarks.workloads import positive

_LOGS = Path("runs/logs")
_START_SECONDS = 600.0
_QUESTION = "What is broken on this chair?"
_NEW_TOKENS = 4
# Of a text stream: so long that its own prompt is in less than one of a hundred gaps.
_STREAM_WORDS, _STREAM_TOKENS = 64, 1_024
# Seconds for all streams to have their first tokens.
_SETTLING = 5.0
# Kinds of requests whose first tokens are measured.
_KINDS = ("new image", "again", "known image, new prompt", "new text", "text again")


@dataclass(slots=True)
class FirstTokens:
    """Seconds from a request to its first token, by kind. tokens: of a prompt with an image."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})
    tokens: int = 0

    def row(self, name: str) -> list[str]:
        medians = (percentile(self.seconds[kind], 50) for kind in _KINDS)
        return [name, str(self.tokens), *(number(None if each is None else 1000 * each) for each in medians)]


@dataclass(slots=True)
class Beside:
    """Text streams while images are computed, or while none are. Times in seconds. images: first tokens of these."""

    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    images: list[float] = field(default_factory=list)

    def add(self, begun: float, ended: float, streams: Sequence[Sequence[float]]) -> None:
        """Adds the gaps that ended between two moments. streams: when the tokens of each reply came."""
        self.seconds += ended - begun
        self.gaps += [
            later - earlier for times in streams for earlier, later in pairwise(times) if begun < later <= ended
        ]

    def row(self, kind: str) -> list[str]:
        times = (*(percentile(self.gaps, each) for each in (50, 99, 100)), percentile(self.images, 50))
        rates = (len(self.gaps) / self.seconds, len(self.images) / self.seconds) if self.seconds else (None, None)
        return [kind, *(number(None if each is None else 1000 * each) for each in times), *map(number, rates)]


def photograph(seed: str, width: int, height: int) -> str:
    """Returns a JPEG with blurred colours and some noise, as a data URL; another one for each seed."""
    random = Random(seed)
    colours = Image.frombytes("RGB", (16, 12), random.randbytes(16 * 12 * 3)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = Image.frombytes("L", (width, height), random.randbytes(width * height)).convert("RGB")
    file = io.BytesIO()
    Image.blend(colours, noise, 0.06).save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


class Client:
    """One user of a server."""

    def __init__(self, url: str, model: str) -> None:
        self._connection = Connection(url)
        self._api = OpenAi(model)

    async def ask(self, text: str, image: str | None = None) -> tuple[float, Reply]:
        """Returns the seconds to the first token, and the reply. Raises ServerUnavailable, BadReply."""
        content: ChatMessage = {"role": "user", "content": text}
        if image is not None:
            parts = [{"type": "image_url", "image_url": {"url": image}}]
            # Text that differs stands in front, so that a prefix cache has the image, but not in this place.
            content = {"role": "user", "content": [{"type": "text", "text": text}, *parts]}
        path, body = self._api.chat([content], _NEW_TOKENS, stream=True)
        response = await self._connection.request("POST", path, body)
        reply = read_reply(response)
        return reply.token_times[0] - response.started, reply

    def close(self) -> None:
        self._connection.close()


async def measure_first_tokens(url: str, model: str, repeat: int, size: tuple[int, int], seed: str) -> FirstTokens:
    """Sends `repeat` photographs, one after the other. Raises ServerUnavailable, BadReply."""
    results, random = FirstTokens(), Random(seed)
    with closing(Client(url, model)) as client:
        for index in range(-1, repeat):  # the first is not counted
            image = photograph(f"{seed} {index}", *size)
            first, reply = await client.ask(_QUESTION, image)
            again, _ = await client.ask(_QUESTION, image)
            moved, _ = await client.ask(f"Look {' '.join(random.choices(COMMON, k=4))} {_QUESTION}", image)
            results.tokens = reply.prompt_tokens or 0
            text = await _text_of(client, results.tokens, random)
            plain, _ = await client.ask(text)
            repeated, _ = await client.ask(text)
            if index >= 0:
                for kind, seconds in zip(_KINDS, (first, again, moved, plain, repeated), strict=True):
                    results.seconds[kind].append(seconds)
    return results


async def _text_of(client: Client, tokens: int, random: Random) -> str:
    """Returns words whose prompt has so many tokens; common words have one each."""
    _, reply = await client.ask(COMMON[0])
    words = tokens - (reply.prompt_tokens or 0) + 1
    if words < 1:
        raise BadReply(f"a prompt with an image has {tokens} tokens, one of a word {reply.prompt_tokens}")
    return " ".join(random.choices(COMMON, k=words))


async def measure_streams(
    url: str, model: str, streams: int, users: int, images: int, rounds: int, size: tuple[int, int]
) -> list[Beside]:
    """Runs streams alone, beside new images, and beside the same ones again, in turns, `rounds` times.

    users: that send images, `images` in each round. Raises ServerUnavailable, BadReply.
    """
    ended, seeds = asyncio.Event(), count()
    tasks = [
        asyncio.create_task(stream_texts(url, OpenAi(model), user, _STREAM_WORDS, _STREAM_TOKENS, ended))
        for user in range(streams)
    ]
    spans: list[tuple[Beside, float, float]] = []
    alone, new, known = results = [Beside(), Beside(), Beside()]
    try:
        await _send(url, model, [photograph("warm-up", *size)], 1)
        await asyncio.sleep(_SETTLING)
        for round_ in range(rounds):
            queue = [photograph(f"queue {next(seeds)}", *size) for _ in range(images)]
            longest = 0.0
            for kind in (new, known):
                begun = time.perf_counter()
                kind.images += await _send(url, model, queue, users)
                spans.append((kind, begun, time.perf_counter()))
                longest = max(longest, spans[-1][2] - begun)
                await asyncio.sleep(1.0)
            begun = time.perf_counter()
            await asyncio.sleep(longest)
            spans.append((alone, begun, time.perf_counter()))
            tell(f"round {round_ + 1} of {rounds}")
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        ended.set()
        token_times = await asyncio.gather(*tasks)
    for kind, begun, until in spans:
        kind.add(begun, until, [times for stream in token_times for times in stream])
    return results


async def _send(url: str, model: str, images: Sequence[str], users: int) -> list[float]:
    """Has users send images, each the next one when it has a reply. Returns the seconds to first tokens."""
    queue, times = iter(images), list[float]()

    async def send() -> None:
        with closing(Client(url, model)) as client:
            for image in queue:
                times.append((await client.ask(_QUESTION, image))[0])

    await asyncio.gather(*(send() for _ in range(users)))
    return times


async def _measure(url: str, arguments: argparse.Namespace) -> tuple[FirstTokens, list[Beside]]:
    model, size = await first_model(url, None), (arguments.width, arguments.height)
    first = await measure_first_tokens(url, model, arguments.repeat, size, f"{time.time_ns()}")
    beside = []
    if arguments.streams:
        beside = await measure_streams(
            url, model, arguments.streams, arguments.users, arguments.images, arguments.rounds, size
        )
    return first, beside


async def _run(arguments: argparse.Namespace) -> dict[str, tuple[FirstTokens, list[Beside]]]:
    if arguments.url is not None:
        return {"server": await _measure(arguments.url, arguments)}
    sides: list[ServerCommand] = [replace(OURS, command=f"{OURS.command} {arguments.server_flags}")]
    if arguments.peer is not None:
        programs = {} if arguments.peer_programs is None else {"programs": arguments.peer_programs.resolve()}
        sides.append(replace(PEERS[arguments.peer], **programs))
    results = {}
    for side in sides:
        log = _LOGS / f"images-{side.name}.log"
        tell(f"{side.name}: starting, log in {log}")
        async with running(side, arguments.start, log, _START_SECONDS) as server:
            results[side.name] = await _measure(server.url, arguments)
    return results


def _print(results: dict[str, tuple[FirstTokens, list[Beside]]]) -> None:
    print("time to the first token, ms (median)")
    print(table(("server", "tokens", *_KINDS), [first.row(name) for name, (first, _) in results.items()]))
    for name, (_, beside) in results.items():
        if not beside:
            continue
        columns = ("", "gap p50, ms", "p99, ms", "max, ms", "image's first token, ms", "tokens/s", "images/s")
        kinds = ("alone", "beside new images", "beside the same again")
        print(f"\n{name}: text streams")
        print(table(columns, [each.row(kind) for each, kind in zip(beside, kinds, strict=True)]))
        usual = percentile(beside[0].gaps, 99) or 0.0
        ratios = ", ".join(f"{(percentile(each.gaps, 99) or 0.0) / usual:.2f}" for each in beside[1:])
        print(f"p99 of gaps beside images / alone: {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--start", type=Path, metavar="MODEL", help="a model folder: starts Oatmill with it")
    server.add_argument("--url", help="of a running server")
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="for the server that --start starts")
    parser.add_argument("--peer", choices=PEERS, help="another server to measure, after Oatmill")
    parser.add_argument("--peer-programs", type=Path, metavar="FOLDER", help="where its programs are")
    parser.add_argument("--repeat", type=positive, default=5, help="first tokens of each kind (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="text streams; 0: first tokens only (default: 8)")
    parser.add_argument("--users", type=positive, default=2, help="users that send images beside streams (default: 2)")
    parser.add_argument("--images", type=positive, default=4, help="new ones in each round (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="default: %(default)s")
    parser.add_argument("--width", type=positive, default=1024, help="of an image (default: %(default)s)")
    parser.add_argument("--height", type=positive, default=768, help="of an image (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    try:
        results = uvloop.run(_run(arguments))
    except (ServerDidNotStart, ServerUnavailable, BadReply, ValueError) as error:
        sys.exit(f"error: {error}")
    _print(results)
    plain = {
        name: {
            "first_tokens": asdict(first),
            "beside": [
                asdict(each) | {"gaps": {f"p{share}": percentile(each.gaps, share) for share in (50, 99, 100)}}
                for each in beside
            ],
        }
        for name, (first, beside) in results.items()
    }
    finish(plain, arguments.output)


if __name__ == "__main__":
    main()
