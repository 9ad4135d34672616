"""A shard that answers at once, without a model: what remains of a request's time is the router's.

    python -m tests.fakes.instant_shard --uds-path /tmp/instant

Its text is made of the tokens that it is given, or of the prompt's, over and over. It keeps the contract of
proto/generate.proto: batches, lengths, logprobs where they are asked for; blocks and samplers it takes at their word.
"""

import argparse
import asyncio
import signal
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import (
    GrammarServiceServicer,
    TextGenerationServiceServicer,
    add_GrammarServiceServicer_to_server,
    add_TextGenerationServiceServicer_to_server,
)
from tgi_server.wire import shared_from_message, shares_memory

# As a shard has them. Without the last two, gRPC closes the connection of a router that has pinged three times.
_SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]
_BLOCK_SIZE = 16
_VOCAB_SIZE = 2**16
_LOGPROB = -0.25


_COLUMNS = {"embed": 1_024, "rank": 1_000}


def _encoder(task: str, folder: Path) -> pb.Encoder:
    labels = [f"label {number}" for number in range(_COLUMNS[task])] if task == "rank" else []
    shape: dict[str, Any] = {"vocab_size": _VOCAB_SIZE, "max_tokens": 8_192, "columns": _COLUMNS[task]}
    return pb.Encoder(task=task, model_id=task, folder=str(folder), model_type="instant", labels=labels, **shape)


class _Row:
    """A request in the batch: how much of its prompt, and of its text, is done. tokens: those that it gets."""

    __slots__ = ("computed", "generated", "length", "request", "template", "tokens")

    def __init__(self, request: pb.Request, tokens: Sequence[int] | None) -> None:
        self.request = request
        self.tokens = tokens
        self.length = len(request.input_ids) + len(request.generated_ids)
        self.computed = request.cached_tokens
        self.generated = len(request.generated_ids)
        self.template = pb.Generation(request_id=request.id, token_ids=[0])
        if request.logprobs:
            self.template.logprobs.append(_LOGPROB)


class InstantShard(TextGenerationServiceServicer, GrammarServiceServicer):
    """tokens: what is generated; None: the prompt, without its first token.

    script: returns the tokens that a request gets in place of these.
    end: the token that ends a text; None: texts end by their length only.
    step_seconds: how long each step takes. fail: every call that computes fails with this message, while it is set.
    health: health checks get no answer while it is cleared.
    grammar_error: why no grammar can be used, when it is not empty.
    num_snapshots: of states; 0: the model has none.
    chosen: sequences of a batch and prompt tokens of a step, where the router leaves them to the shards.
    encoders: a folder with a tokenizer; it embeds with 1,024 columns, and classifies with 1,000 labels.
    encoded: the images that were computed. image_error: why none can be, when it is not empty.
    moves: how often it fell asleep and woke, as words. sleep_error: why it cannot sleep, when it is not empty.
    """

    def __init__(
        self,
        url: str,
        tokens: Sequence[int] | None,
        *,
        end: int | None = None,
        step_seconds: float = 0.0,
        max_total_tokens: int = 4096,
        num_blocks: int = 65_536,
        vocab_size: int = _VOCAB_SIZE,
        max_position_embeddings: int = 0,
        grammars: bool = True,
        fallbacks: Sequence[str] = (),
        images: bool = False,
        whole_images: bool = False,
        encoders: Path | None = None,
        num_snapshots: int = 0,
        chosen: tuple[int, int] = (0, 0),
    ) -> None:
        self.tokens = tokens
        self.script: Callable[[pb.Request], Sequence[int]] | None = None
        self.step_seconds = step_seconds
        self.fail: str | None = None
        self.drafted: set[int] = set()  # tokens that are said to have been drafted
        self.health = asyncio.Event()
        self.health.set()
        self.grammar_error = ""
        self.received: deque[pb.Request] = deque(maxlen=1_000)
        self.encoded: list[pb.Image] = []
        self.image_error = ""
        self.moves: list[str] = []
        self.sleep_error = ""
        self._images = images
        self._whole_images = whole_images
        self._encoders = [] if encoders is None else [_encoder(task, encoders) for task in _COLUMNS]
        self._num_snapshots = num_snapshots
        self._chosen = chosen
        self._url = url
        self._end = end
        self._max_total_tokens = max_total_tokens
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._max_position_embeddings = max_position_embeddings
        self._grammars = grammars
        self._fallbacks = fallbacks
        self._rows: dict[int, _Row] = {}

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        return pb.InfoResponse(
            model_id="instant",
            model_type="instant",
            dtype="float32",
            device_type="cpu",
            world_size=1,
            vocab_size=self._vocab_size,
            max_position_embeddings=self._max_position_embeddings,
            paged=True,
            block_size=_BLOCK_SIZE,
            grammars=self._grammars,
            images=self._images,
            shares_memory=self._images and shares_memory(request.probe),
            whole_images=self._whole_images,
            encoders=self._encoders,
            states=self._num_snapshots > 0,
        )

    async def ServiceDiscovery(self, request: pb.ServiceDiscoveryRequest, context: Any) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=[self._url], grammar_urls=[self._url])

    async def Sleep(self, request: pb.SleepRequest, context: grpc.aio.ServicerContext) -> pb.SleepResponse:
        if self.sleep_error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.sleep_error)
        self.moves.append("sleeps")
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: grpc.aio.ServicerContext) -> pb.WakeResponse:
        self.moves.append("wakes")
        return pb.WakeResponse()

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        await self.health.wait()
        await self._perhaps_fail(context)
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        return pb.WarmupResponse(
            num_blocks=self._num_blocks,
            max_total_tokens=min(request.max_total_tokens or self._max_total_tokens, self._max_total_tokens),
            max_batch_total_tokens=self._num_blocks * _BLOCK_SIZE,
            fallbacks=self._fallbacks,
            num_snapshots=self._num_snapshots,
            max_batch_size=request.max_batch_size or self._chosen[0],
            max_prefill_tokens=request.max_prefill_tokens or self._chosen[1],
        )

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        """Takes any folder for an adapter, except one that is called `broken`."""
        if request.folder.endswith("broken"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "tensor x has the shape [2]")
        return pb.LoadAdapterResponse(rank=8, bytes=100)

    async def EncodeImages(self, request: pb.EncodeImagesRequest, context: Any) -> pb.EncodeImagesResponse:
        for tensor in (each for image in request.images for each in image.tensors if each.HasField("shared")):
            assert len(shared_from_message(tensor.shared).map()) == tensor.shared.size
        if self.image_error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.image_error)
        self.encoded += request.images
        return pb.EncodeImagesResponse()

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        columns = request.dimensions or _COLUMNS[request.task]
        return pb.EncodeResponse(
            values=array("f", [0.123456789] * columns * len(request.inputs)).tobytes(), columns=columns
        )

    async def Compile(self, request: pb.CompileRequest, context: Any) -> pb.CompileResponse:
        await self._perhaps_fail(context)
        return pb.CompileResponse(error=self.grammar_error)

    async def Run(self, calls: AsyncIterator[pb.Call], context: Any) -> AsyncIterator[pb.Answer]:
        async for call in calls:
            if self.fail is not None:
                yield pb.Answer(failure=pb.Failure(reason=self.fail))
                await asyncio.Event().wait()
            kind = call.WhichOneof("call")
            if kind == "decode":
                yield await self._answer([self._next(row) for row in self._running()])
            elif kind == "prefill":
                yield await self._answer(self._prefill(call.prefill))
            elif kind == "filter_batch":
                keep = set(call.filter_batch.keep_request_ids)
                self._rows = {request_id: row for request_id, row in self._rows.items() if request_id in keep}
                yield pb.Answer(filter_batch=pb.FilterBatchResponse())
            else:
                self._rows.clear()
                yield pb.Answer(clear_cache=pb.ClearCacheResponse())

    async def _perhaps_fail(self, context: Any) -> None:
        if self.fail is not None:
            await context.abort(grpc.StatusCode.INTERNAL, self.fail)

    def _prefill(self, request: pb.PrefillRequest) -> list[pb.Generation]:
        generations = [self._next(row) for row in self._running()] if request.decode else []
        for joining in request.requests:
            self.received.append(joining)
            self._rows[joining.id] = _Row(joining, self.script(joining) if self.script else None)
        for chunk in request.chunks:
            row = self._rows[chunk.request_id]
            row.computed += chunk.tokens
            if row.computed >= row.length:
                generations.append(self._first(row))
        return generations

    def _running(self) -> list[_Row]:
        return [row for row in self._rows.values() if row.computed >= row.length]

    def _first(self, row: _Row) -> pb.Generation:
        generation = self._next(row)
        if row.request.prefill_logprobs:
            ids = row.request.input_ids
            generation.prefill_tokens.ids.extend(ids)
            generation.prefill_tokens.logprobs.extend([float("nan")] + [_LOGPROB] * (len(ids) - 1))
            if row.request.prefill_top_n:
                top = pb.TopTokens(
                    ids=range(row.request.prefill_top_n), logprobs=[_LOGPROB] * row.request.prefill_top_n
                )
                generation.prefill_tokens.top_tokens.extend([top] * len(ids))
        return generation

    def _next(self, row: _Row) -> pb.Generation:
        request, generation = row.request, pb.Generation()
        generation.CopyFrom(row.template)
        tokens = row.tokens or self.tokens or request.input_ids[1:]
        token = tokens[row.generated % len(tokens)]
        row.generated += 1
        generation.token_ids[0] = token
        generation.drafted = token in self.drafted
        if reported := request.scored_token_ids or range(request.top_n_tokens):
            generation.top_tokens.add(ids=reported, logprobs=[_LOGPROB] * len(reported))
        if token == self._end and not request.ignore_eos:
            generation.finish_reason = pb.FINISH_REASON_EOS_TOKEN
        elif row.generated >= request.max_new_tokens:
            generation.finish_reason = pb.FINISH_REASON_LENGTH
        if generation.finish_reason:
            del self._rows[request.id]
        return generation

    async def _answer(self, generations: list[pb.Generation]) -> pb.Answer:
        if self.step_seconds:
            await asyncio.sleep(self.step_seconds)
        return pb.Answer(step=pb.StepResponse(generations=generations))


async def start(shard: InstantShard, path: Path) -> grpc.aio.Server:
    """Serves `shard` on the Unix socket `path`."""
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    add_TextGenerationServiceServicer_to_server(shard, server)
    add_GrammarServiceServicer_to_server(shard, server)
    server.add_insecure_port(f"unix://{path}")
    await server.start()
    return server


async def _serve(arguments: argparse.Namespace) -> None:
    shard = InstantShard(
        f"unix://{arguments.uds_path}",
        arguments.tokens,
        step_seconds=arguments.step_seconds,
        max_total_tokens=arguments.max_total_tokens,
        images=arguments.images,
        encoders=arguments.encoders,
    )
    server = await start(shard, arguments.uds_path)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: asyncio.ensure_future(server.stop(0)))
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uds-path", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(range(100, 164)), help="ids that are generated")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step takes (default: %(default)s)")
    parser.add_argument("--max-total-tokens", type=int, default=4096, help="of a prompt and its answer (%(default)s)")
    parser.add_argument("--images", action="store_true", help="it takes prompts with images")
    parser.add_argument(
        "--encoders", type=Path, help="it embeds and classifies texts, with the tokenizer of this folder"
    )
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
