"""The server that a beginner writes around `transformers`, as something to compare with.

    python -m benchmarks.naive_server runs/synthetic/opt-125m --port 8090

Requests wait for up to 100 ms to make a batch of up to 50; `generate()` runs the batch, padded, to the end of its
longest reply; meanwhile everybody else waits. Replies come whole, never as streams.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.completions import CompletionRequest, completion, create_app


class GenerateParameters(BaseModel):
    max_new_tokens: Annotated[int, Field(ge=1)] = 20
    ignore_eos: bool = False


class GenerateRequest(BaseModel):
    """TGI's `/generate`."""

    inputs: str
    parameters: GenerateParameters = GenerateParameters()


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    prompt_tokens: int
    new_tokens: int


@dataclass(slots=True)
class Waiting:
    prompt: str
    max_new_tokens: int
    ignore_eos: bool
    reply: "asyncio.Future[Reply]"


class Generator:
    """A model of `transformers` and its own `generate()`, greedy."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        disable_progress_bar()
        set_verbosity_error()
        self._tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
        self._eos = self._tokenizer.eos_token_id
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    @torch.inference_mode()
    def generate(self, batch: list[Waiting]) -> list[Reply]:
        """Everybody's reply, each cut to its own length. One that ignores the end of sequence does so for all."""
        inputs = self._tokenizer([waiting.prompt for waiting in batch], return_tensors="pt", padding=True)
        most = max(waiting.max_new_tokens for waiting in batch)
        least = max((waiting.max_new_tokens for waiting in batch if waiting.ignore_eos), default=0)
        lengths = {"max_new_tokens": most, "min_new_tokens": least}
        pad = self._tokenizer.pad_token_id
        outputs = self._model.generate(**inputs, **lengths, do_sample=False, pad_token_id=pad)
        prompt_tokens = inputs["attention_mask"].sum(1).tolist()
        generated = outputs[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._reply(*one) for one in zip(batch, prompt_tokens, generated, strict=True)]

    def _reply(self, waiting: Waiting, prompt_tokens: int, generated: list[int]) -> Reply:
        tokens = generated[: waiting.max_new_tokens]
        if self._eos in tokens:
            tokens = tokens[: tokens.index(self._eos) + 1]
        return Reply(self._tokenizer.decode(tokens, skip_special_tokens=True), prompt_tokens, len(tokens))


class StaticBatching:
    """Collects requests into batches; one batch runs at a time, from its beginning to its end."""

    def __init__(self, generator: Generator, max_batch_size: int, wait: float) -> None:
        """wait: seconds, from a batch's first request on."""
        self._generator = generator
        self._max_batch_size = max_batch_size
        self._wait = wait
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()

    async def ask(self, prompt: str, max_new_tokens: int, ignore_eos: bool) -> Reply:
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(Waiting(prompt, max_new_tokens, ignore_eos, reply))
        return await reply

    async def run(self) -> None:
        while True:
            batch = await self._collect()
            try:
                replies = await asyncio.to_thread(self._generator.generate, batch)
            except Exception as error:  # one batch's failure is its own
                for waiting in batch:
                    waiting.reply.set_exception(HTTPException(500, f"generation failed: {error}"))
                continue
            for waiting, reply in zip(batch, replies, strict=True):
                if not waiting.reply.done():
                    waiting.reply.set_result(reply)

    async def _collect(self) -> list[Waiting]:
        batch = [await self._queue.get()]
        deadline = time.monotonic() + self._wait
        while len(batch) < self._max_batch_size:
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), deadline - time.monotonic()))
            except TimeoutError:
                break
        return batch


def naive_app(batching: StaticBatching, model: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batching.run())
        yield
        task.cancel()

    app = create_app(model, lifespan)

    @app.post("/generate")
    async def generate(request: GenerateRequest) -> dict[str, Any]:
        parameters = request.parameters
        reply = await batching.ask(request.inputs, parameters.max_new_tokens, parameters.ignore_eos)
        return {"generated_text": reply.text, "details": {"generated_tokens": reply.new_tokens}}

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> dict[str, Any]:
        if request.stream:
            raise HTTPException(422, "this server does not stream")
        reply = await batching.ask(request.prompt, request.max_tokens, request.ignore_eos)
        return completion(model, reply.text, reply.prompt_tokens, reply.new_tokens)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090, help="default: %(default)s")
    parser.add_argument("--max-batch-size", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--wait", type=float, default=0.1, help="seconds to fill a batch (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        sys.exit(f"error: no model in {arguments.model}; `python -m benchmarks.synthetic` writes some")
    generator = Generator(arguments.model, getattr(torch, arguments.dtype))
    batching = StaticBatching(generator, arguments.max_batch_size, arguments.wait)
    app = naive_app(batching, arguments.model.name)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
