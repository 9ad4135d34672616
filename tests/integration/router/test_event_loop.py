"""No body blocks the event loop for other requests: bodies are made from the schema of every POST route."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tokenizers import Tokenizer, decoders

from tests.conftest import FreePort
from tests.integration.router.filled_bodies import WHOLE, Place, Schemas, body, candidates, limits_answer, mark, merged
from tests.integration.router.process import Start, longest_turn
from tgi_server import demo_model

BOUND_SECONDS = 0.25
# So long no machine makes a turn of the loop by being busy.
CERTAIN_SECONDS = 3.0
RESPONSE_SECONDS = 100.0
ROOM = 1_990_000
# A text of so many bytes is a prompt that is taken.
PROMPT_ROOM = 200_000
TRIES = 4
# Responses of a conversation that goes on.
TURNS = 14


# Routes whose bodies are those of other routes, which fill each place in every way.
SAME_BODIES = {
    "/generate_stream": ("/generate",),
    "/": ("/generate",),
    "/v1/messages/count_tokens": ("/v1/messages",),
    "/v1/responses/input_tokens": ("/v1/responses",),
    "/chat_tokenize": ("/v1/chat/completions",),
    "/v1/warm": ("/v1/chat/completions", "/v1/completions"),
    "/v1/decisions": ("/v1/responses",),  # in its input
    "/vertex": ("/v1/chat/completions", "/generate"),
    "/invocations": ("/v1/chat/completions", "/v1/completions", "/generate"),
}
# Fillings of such places on the routes that share them: the slowest of each kind.
FEW_FILLINGS = ("lists", "text of '<|user|>'", "items", "members", "schema")


@dataclass(slots=True)
class Shape:
    """A request. make: returns its body."""

    path: str
    name: str
    make: Callable[[], str]
    method: str = "POST"


@dataclass(slots=True)
class Watched:
    """A router in a process of its own, and what says for how long its loop stood still."""

    http: httpx.AsyncClient
    watch: Path
    schemas: Schemas
    slow: dict[str, float] = field(default_factory=dict)

    async def stood(self) -> float:
        """Returns for how many seconds the loop stood still since the last call, at the longest."""
        return await longest_turn(self.watch)

    async def check(self, shape: Shape) -> Any:
        """Sends the request. Returns the response's JSON, or None for an error.

        On a busy machine a turn of the loop may be long; what is the loop's own doing is so each time.
        """
        content = shape.make()
        assert len(content.encode()) <= 2_000_000, shape.name
        worst: list[float] = []
        status = 0
        while len(worst) < TRIES and (not worst or BOUND_SECONDS < worst[-1] < CERTAIN_SECONDS):
            await self.stood()
            try:
                response = await self.http.request(shape.method, shape.path, content=content)
            except httpx.TransportError:  # it takes long, or its client held too much memory
                status = 0
                worst.append(await self.stood())
            else:
                status = response.status_code
                worst.append(await self.stood())
                # A busy setting may be a time that has passed before the request is read.
                late = response.headers.get("x-error-code", "").startswith("deadline_")
                assert late or status in (200, 400, 403, 404, 413, 422, 429, 501), (shape, response.text[:500])
        if worst[-1] > BOUND_SECONDS:
            self.slow[f"{shape.path} {shape.name}"] = min(worst)
        print(f"{min(worst):.3f} {len(worst)} {status} {shape.path} {shape.name}")
        return response.json() if status == 200 and "json" in response.headers["content-type"] else None

    async def short(self, path: str) -> dict[str, Any]:
        """Returns settings for short answers."""
        return await self._accepted(path, {}, [place for place in self._choices(path) if limits_answer(place)])

    async def busy(self, path: str, short: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings that make the most work besides, as far as they are taken together."""
        return await self._accepted(path, short, [place for place in self._choices(path) if not limits_answer(place)])

    def _choices(self, path: str) -> list[Place]:
        return [place for place in self.schemas.places(self.schemas.bodies[path]) if candidates(place)]

    async def _accepted(self, path: str, chosen: Any, places: list[Place]) -> dict[str, Any]:
        """Returns the chosen settings and, of each place, the first candidate that the server takes besides."""
        for _ in range(2):  # some are taken only with others
            for place in list(places):
                for value in candidates(place):
                    tried = merged([PLAIN, place], [chosen, value])
                    response = await self.http.post(path, content=body(tried, {}, ()))
                    if response.status_code == 200:
                        chosen = tried
                        places.remove(place)
                        break
        return dict(chosen)


PLAIN = Place((), {}, lambda value: value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that has what makes many models' slow: steps of decoding, and many special tokens."""
    folder = tmp_path_factory.mktemp("model")
    for file in demo_model.PATH.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    tokenizer = Tokenizer.from_file(str(demo_model.PATH / "tokenizer.json"))
    spaces = [decoders.Replace(space, " ") for space in ("\u2581", "\u2420", "\u00a0", "\u3000")]
    steps = [*spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([f"<|reserved_special_token_{number}|>" for number in range(1_000)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
async def watched(
    start: Start, free_port: FreePort, model: Path, patient_shard_path: Path, tmp_path: Path
) -> AsyncIterator[Watched]:
    url, watch = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "watch"
    process = start(
        f"--tokenizer-name={model}",
        f"--master-shard-uds-path={patient_shard_path}",
        "--hostname=127.0.0.1",
        f"--port={port}",
        "--tool-call-parser=qwen3_coder",  # whose arguments are read one by one
        watch=watch,
    )
    process.until_ready(url)
    async with httpx.AsyncClient(base_url=url, timeout=RESPONSE_SECONDS) as http:
        document = (await http.get("/openapi.json")).json()
        yield Watched(http, watch, Schemas(document))


def single(schemas: Schemas, path: str, settings: dict[str, Any]) -> Iterator[Shape]:
    """Yields the bodies of a route that have one place filled."""
    shared = _shared(schemas, path)
    for place in schemas.places(schemas.bodies[path]):
        for filling in schemas.fillings(place.schema):
            if place.name in shared and filling.name not in FEW_FILLINGS:
                continue
            for room in (ROOM, PROMPT_ROOM) if "text" in filling.name or place.name.startswith("prompt") else (ROOM,):
                yield Shape(
                    path,
                    f"{place.name}: {filling.name}, {room} bytes",
                    lambda place=place, filling=filling, room=room: _filled([place], [filling.text], settings, room),
                )


def pairs(schemas: Schemas, path: str, settings: dict[str, Any]) -> Iterator[Shape]:
    """Yields the bodies of a route that have two places filled with items whose names are the same."""
    shared = _shared(schemas, path)
    growing = [place for place in schemas.places(schemas.bodies[path]) if place.grows]
    for both in combinations(growing, 2):
        if {each.name for each in both} <= shared or both[0].path == both[1].path[: len(both[0].path)]:
            continue
        fillings = [_items(schemas, place) for place in both]
        yield Shape(
            path,
            " with ".join(place.name for place in both),
            lambda both=both, fillings=fillings: _filled(both, fillings, settings, ROOM),
        )


def _shared(schemas: Schemas, path: str) -> set[str]:
    """Returns the names of the places that other routes fill in every way."""
    others = (place for each in SAME_BODIES.get(path, ()) for place in schemas.places(schemas.bodies[each]))
    within = "instances.[]." if path == "/vertex" else ""
    return {within + place.name for place in others}


def _items(schemas: Schemas, place: Place) -> Callable[[int], str]:
    wanted = ("items", "members") if place.schema.get("type") else ("schema",)
    return next(each.text for each in schemas.fillings(place.schema) if each.name in wanted)


def _filled(
    places: Sequence[Place], fillings: Sequence[Callable[[int], str]], settings: dict[str, Any], room: int
) -> str:
    """room: bytes of the body."""
    marks = [mark(index) for index in range(len(places))]
    frame = body(merged(places, marks), settings, ())
    room = (room - len(frame.encode())) // len(places)
    return body(merged(places, marks), settings, [_fitting(filling, room) for filling in fillings])


def _fitting(filling: Callable[[int], str], room: int) -> str:
    text = filling(room)
    return text if len(text.encode()) <= room + 100 else filling(room * room // len(text.encode()) - 200)


def whole(path: str) -> Iterator[Shape]:
    """Yields bodies of a route that are none."""
    for unit in WHOLE:
        yield Shape(path, f"{unit!r}, again and again", lambda unit=unit: unit * (ROOM // len(unit)))


async def converse(watched: Watched, path: str, settings: dict[str, Any], names: Sequence[str] = ()) -> None:
    """Checks long conversations: each request refers to the last response, which then is fetched.

    names: of the fillings; none: all.
    """
    inputs = [place for place in watched.schemas.places(watched.schemas.bodies[path]) if place.path == ("input",)]
    for place in inputs:
        for filling in watched.schemas.fillings(place.schema):
            if names and filling.name not in names:
                continue
            previous: dict[str, Any] = {}
            for turn in range(TURNS):
                chosen = settings | previous
                name = f"turn {turn} of a conversation with {place.name}: {filling.name}"
                text = partial(_filled, [place], [filling.text], chosen, ROOM)
                response = await watched.check(Shape(path, name, text))
                if response is None:
                    break
                previous = {"previous_response_id": response["id"]}
                await watched.check(Shape(f"{path}/{response['id']}", name, str, "GET"))


ROUTES = (
    "/generate",
    "/generate_stream",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/pull",
    "/",
    "/invocations",
    "/vertex",
    "/tokenize",
    "/chat_tokenize",
    "/detokenize",
    "/v1/warm",
    "/v1/forget",
    "/v1/explain",
    "/v1/decisions",
    "/v1/embeddings",
    "/embed",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/predict",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


# What took longest before it was mended, of each kind.
WORST = {
    "/generate": ("parameters.grammar.value: schema",),
    "/v1/chat/completions": ("tools with tool_choice.allowed_tools.tools", "messages.[].content: text of '<|user|>'"),
    "/v1/completions": ("prompt: the number 5", "structured_outputs.choice.[]: text of '<|user|>'"),
    "/detokenize": ("tokens: the number 5",),
}
# Bodies that become much larger: many texts, with 1,024 numbers or 1,000 labels each.
LARGEST = {
    "/embed": {"inputs": ["rice"] * 2_048},
    "/v1/embeddings": {"input": ["rice"] * 2_048, "model": "embed"},
    "/predict": {"inputs": [["rice"]] * 256},
}
CONVERSED = ("text of 'rice '", "items")


async def test_the_loop_is_watched(watched: Watched):
    for _ in range(int(RESPONSE_SECONDS)):
        text = (await watched.http.get("/metrics")).text
        if re.search(r"^tgi_event_loop_lag_seconds_count [1-9]", text, re.MULTILINE):
            return
        await asyncio.sleep(0.2)
    pytest.fail("the lag of the event loop was not observed")


async def test_others_are_served_while_the_worst_bodies_are_read(watched: Watched):
    assert set(ROUTES) == set(watched.schemas.bodies)
    for path, names in WORST.items():
        short = await watched.short(path)
        shapes = [*single(watched.schemas, path, short), *pairs(watched.schemas, path, short)]
        for name in names:
            await watched.check(next(shape for shape in shapes if shape.name.startswith(name)))
    for path, content in LARGEST.items():
        text = json.dumps(content)
        assert await watched.check(Shape(path, "many texts", lambda text=text: text)) is not None
    await converse(watched, "/v1/responses", {"max_output_tokens": 2, "truncate_prompt_tokens": 100}, CONVERSED)
    await check_small_chunks(watched, 1, 200_000)
    assert not watched.slow


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", ROUTES)
async def test_others_are_served_whatever_a_body_holds(watched: Watched, path: str):
    short = await watched.short(path)
    busy = await watched.busy(path, short)
    print("settings", json.dumps(busy))
    for each in (short, busy):
        for shape in (*single(watched.schemas, path, each), *whole(path)):
            await watched.check(shape)
    for shape in pairs(watched.schemas, path, busy):
        await watched.check(shape)
    if path == "/v1/responses":
        await converse(watched, path, busy)
    assert not watched.slow


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7])
async def test_others_are_served_while_a_body_comes_in_small_chunks(watched: Watched, size: int):
    await check_small_chunks(watched, size, ROOM)
    assert not watched.slow


async def check_small_chunks(watched: Watched, size: int, room: int) -> None:
    """Checks a body of `room` bytes that comes in chunks of `size` bytes, many of them at a time."""
    body = json.dumps({"inputs": "a" * (room - 100), "parameters": {"truncate": 10, "max_new_tokens": 2}}).encode()
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    url = urlsplit(str(watched.http.base_url))
    worst: list[float] = []
    while len(worst) < TRIES and (not worst or worst[-1] > BOUND_SECONDS):
        await watched.stood()
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" + sent)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        worst.append(await watched.stood())
    if worst[-1] > BOUND_SECONDS:
        watched.slow[f"chunks of {size} bytes"] = min(worst)
