"""Serves OpenVINO GenAI with continuous batching by OpenAI's streamed `/v1/completions`, for comparison.

Runs in an environment of its own (README.md). The model generates in a second process, because a step keeps Python's
lock until it is done. Decoding is greedy, and replies have their full length.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CACHE_GIB = 4


def generate(folder: Path, channel: Connection) -> None:
    """Takes requests (number, prompt's tokens, new tokens) until the channel ends; sends None once the model is there.

    After every step it sends (number, new tokens, whether it has all of them) of each running request.
    """
    settings = openvino_genai.SchedulerConfig()
    settings.cache_size, settings.enable_prefix_caching = _CACHE_GIB, True
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, settings, "CPU")
    running: dict[int, Any] = {}
    channel.send(None)
    while True:
        while not running or channel.poll():
            try:
                number, prompt, max_tokens = channel.recv()
            except EOFError:
                return
            config = pipeline.get_config()
            config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
            tokens = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            running[number] = pipeline.add_request(number, tokens, config)
        pipeline.step()
        news = []
        for number, handle in list(running.items()):
            finished, new = handle.get_status().name != "RUNNING", []
            while handle.can_read():
                new += [token for output in handle.read().values() for token in output.generated_ids]
            news.append((number, new, finished))
            if finished:
                del running[number]
        channel.send(news)


def application(folder: Path, channel: Connection) -> Starlette:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    numbers = count()
    queues: dict[int, asyncio.Queue[tuple[list[int], bool]]] = {}

    def receive() -> None:
        try:
            for number, new, finished in channel.recv():
                queues[number].put_nowait((new, finished))
        except EOFError:
            os._exit(1)  # the other process has said why

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().add_reader(channel.fileno(), receive)
        yield

    async def events(prompt: list[int], max_tokens: int) -> AsyncIterator[str]:
        number, queue = next(numbers), asyncio.Queue[Any]()
        queues[number] = queue
        channel.send((number, prompt, max_tokens))
        text, new_tokens, finished = DecodeStream(skip_special_tokens=True), 0, False
        while not finished:
            new, finished = await queue.get()
            for token in new:
                new_tokens += 1
                yield _event([{"index": 0, "text": text.step(tokenizer, token) or ""}])
        del queues[number]
        yield _event([], {"prompt_tokens": len(prompt), "completion_tokens": new_tokens}) + "data: [DONE]\n\n"

    async def completions(request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        if not body.get("stream"):
            return JSONResponse({"error": "only streams are served; add --stream to the load"}, status_code=422)
        reply = events(tokenizer.encode(body["prompt"]).ids, body["max_tokens"])
        return StreamingResponse(reply, media_type="text/event-stream")

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": folder.name, "object": "model"}]})

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    return Starlette(routes=[*routes, Route("/health", models)], lifespan=lifespan)


def _event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
    return f"data: {json.dumps({'object': 'text_completion', 'choices': choices, 'usage': usage})}\n\n"


def main() -> None:
    """Serves the folder of the first argument, which `optimum-cli export openvino` wrote, on the port of the second."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    processes = get_context("spawn")
    channel, other_end = processes.Pipe()
    processes.Process(target=generate, args=(folder, other_end), daemon=True).start()
    other_end.close()
    channel.recv()
    uvicorn.run(application(folder, channel), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
