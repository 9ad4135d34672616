"""OpenVINO GenAI with continuous batching behind OpenAI's `/v1/completions`, as something to compare with.

    /opt/peers/openvino/bin/python -m benchmarks.openvino_server /opt/peers/models/opt-125m-int8 --port 8090

Runs in an environment of its own (README.md). The model generates in a second process, because a step keeps Python's
lock until it is done. Decoding is greedy; a request runs to its end even if nobody waits for it any more.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from benchmarks.completions import CompletionRequest, completion, create_app


@dataclass(frozen=True, slots=True)
class Order:
    number: int
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class News:
    """New tokens of the order with that number."""

    number: int
    tokens: list[int]
    finished: bool


class Engine:
    """Takes orders from a channel, and sends a list of news after every step."""

    def __init__(self, folder: Path, cache_gib: int, channel: Connection) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
        self._channel = channel
        self._running: dict[int, Any] = {}

    def run(self) -> None:
        """Returns when the other end of the channel is closed."""
        try:
            while True:
                while not self._running or self._channel.poll():
                    self._add(self._channel.recv())
                self._pipeline.step()
                self._channel.send([self._news(number) for number in list(self._running)])
        except EOFError:
            return

    def _add(self, order: Order) -> None:
        config = self._pipeline.get_config()
        config.max_new_tokens = order.max_tokens
        config.ignore_eos = order.ignore_eos
        config.do_sample = False
        prompt = openvino.Tensor(numpy.array([order.prompt], dtype=numpy.int64))
        self._running[order.number] = self._pipeline.add_request(order.number, prompt, config)

    def _news(self, number: int) -> News:
        handle, tokens = self._running[number], []
        finished = handle.get_status().name != "RUNNING"
        while handle.can_read():
            tokens += [token for output in handle.read().values() for token in output.generated_ids]
        if finished:
            del self._running[number]
        return News(number, tokens, finished)


def run_engine(folder: Path, cache_gib: int, channel: Connection) -> None:
    """What the second process does. Sends None when the model is there."""
    engine = Engine(folder, cache_gib, channel)
    channel.send(None)
    engine.run()


class Generator:
    """The HTTP server's end of the channel."""

    def __init__(self, folder: Path, channel: Connection) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._channel = channel
        self._numbers = count()
        self._queues: dict[int, asyncio.Queue[News]] = {}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    async def generate(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> AsyncIterator[str]:
        """The text of every new token; empty where it takes the next one to make a character."""
        order = Order(next(self._numbers), prompt, max_tokens, ignore_eos)
        queue = self._queues[order.number] = asyncio.Queue()
        self._channel.send(order)
        text = DecodeStream(skip_special_tokens=True)
        finished = False
        while not finished:
            news = await queue.get()
            finished = news.finished
            for token in news.tokens:
                yield text.step(self._tokenizer, token) or ""

    def listen(self) -> None:
        """Passes on what the engine tells, from now on; to be called in the event loop."""
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            step: list[News] = self._channel.recv()
        except EOFError:
            print("error: the process that generates has ended", file=sys.stderr, flush=True)
            os._exit(1)
        for news in step:
            queue = self._queues.pop(news.number) if news.finished else self._queues[news.number]
            queue.put_nowait(news)


def openvino_app(generator: Generator, model: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        generator.listen()
        yield

    app = create_app(model, lifespan)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: CompletionRequest) -> dict[str, Any] | StreamingResponse:
        prompt = generator.encode(request.prompt)
        texts = generator.generate(prompt, request.max_tokens, request.ignore_eos)
        if request.stream:
            return StreamingResponse(_events(model, len(prompt), texts), media_type="text/event-stream")
        pieces = [text async for text in texts]
        return completion(model, "".join(pieces), len(prompt), len(pieces))

    return app


async def _events(model: str, prompt_tokens: int, texts: AsyncIterator[str]) -> AsyncIterator[str]:
    new_tokens = 0
    async for text in texts:
        new_tokens += 1
        yield _event({"model": model, "choices": [{"index": 0, "text": text}]})
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
    yield _event({"model": model, "choices": [], "usage": usage}) + "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder that `optimum-cli export openvino` wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090, help="default: %(default)s")
    parser.add_argument("--cache-gib", type=int, default=4, help="of keys and values (default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.model / "openvino_model.xml").is_file():
        sys.exit(f"error: no exported model in {arguments.model}; benchmarks/README.md tells how to write one")
    processes = get_context("spawn")
    channel, engine_channel = processes.Pipe()
    engine_arguments = (arguments.model, arguments.cache_gib, engine_channel)
    processes.Process(target=run_engine, args=engine_arguments, daemon=True).start()
    engine_channel.close()
    try:
        channel.recv()
    except EOFError:
        sys.exit(f"error: {arguments.model} cannot be served; the reason stands above")
    app = openvino_app(Generator(arguments.model, channel), arguments.model.name)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
