"""Embedding and rerank models over gRPC, with or without a text-generation model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import torch

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceServicer
from tgi_server.engine.checkpoint.weight_files import weight_bytes
from tgi_server.engine.encoders import Encoder
from tgi_server.engine.errors import InvalidCall
from tgi_server.shard.encoder_queue import EncoderQueue
from tgi_server.shard.sleep_calls import SleepCalls


def encoder_message(encoder: Encoder, model_id: str, folder: Path) -> pb.Encoder:
    """Returns the description of a model for the router."""
    info = encoder.info
    return pb.Encoder(
        task=info.task,
        model_id=model_id,
        folder=str(folder),
        model_type=info.model_type,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        max_tokens=info.max_tokens,
        columns=info.columns,
        labels=info.labels,
        answers=info.answers,
        pooling=info.pooling,
        weight_bytes=weight_bytes(folder),
    )


async def encode(
    queue: EncoderQueue | None, request: pb.EncodeRequest, context: grpc.aio.ServicerContext
) -> pb.EncodeResponse:
    """Encodes a request's texts. Aborts the call if there is no model for the task."""
    if queue is None or request.task not in queue.encoders:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no model is loaded for the task {request.task!r}")
        raise AssertionError  # the call has ended
    gap_s = request.target_gap_ms / 1000 or None
    values = await queue.encode(
        "rank" if request.task == "rank" else "embed",
        request.inputs,
        dimensions=request.dimensions,
        unit=request.normalize,
        target_gap_s=gap_s,
    )
    return pb.EncodeResponse(values=values.contiguous().numpy().tobytes(), columns=values.shape[1])


class EncoderService(TextGenerationServiceServicer):
    """The service of a shard without a text-generation model."""

    def __init__(
        self, queue: EncoderQueue, encoders: Sequence[pb.Encoder], urls: tuple[str, str], sleep: SleepCalls
    ) -> None:
        """urls: addresses of this service, and of the GrammarService, which has nothing to compile here."""
        first = encoders[0]
        self._queue = queue
        self._sleep = sleep
        self._urls = urls
        self._info = pb.InfoResponse(
            model_id=first.model_id,
            model_type=first.model_type,
            dtype=first.dtype,
            device_type=next(iter(queue.encoders.values())).info.device_type,
            world_size=1,
            vocab_size=first.vocab_size,
            max_position_embeddings=first.max_tokens,
            encoders=encoders,
            encoders_only=True,
        )

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.InfoResponse:
        return self._info

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=[self._urls[0]], grammar_urls=[self._urls[1]])

    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext) -> pb.HealthResponse:
        device = next(iter(self._queue.encoders.values())).info.device_type
        await asyncio.to_thread(lambda: int(torch.ones(2, device=device).sum()))
        return pb.HealthResponse()

    async def Encode(self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
        try:
            self._sleep.check_awake()
        except InvalidCall as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return await encode(self._queue, request, context)

    async def Sleep(self, request: pb.SleepRequest, context: grpc.aio.ServicerContext) -> pb.SleepResponse:
        try:
            return await self._sleep.sleep(request)
        except InvalidCall as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError from error  # the call has ended

    async def Wake(self, request: pb.WakeRequest, context: grpc.aio.ServicerContext) -> pb.WakeResponse:
        return await self._sleep.wake()
