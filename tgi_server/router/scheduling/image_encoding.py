"""Encodes images between steps, before their requests are queued."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Protocol

from tgi_server.contract import Image
from tgi_server.router.errors import InvalidRequest, RouterError
from tgi_server.router.metrics import ImageMetrics
from tgi_server.router.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

# Number of latest images that the shards probably still have. Their pixels, megabytes, are sent only if they do not.
_RECENT = 1024


class ImageShards(Protocol):
    """The part of `ShardedClient` that encodes images."""

    async def encode_images(self, images: Iterable[Image], target_gap_ms: float) -> None:
        """Encodes images. Raises InvalidRequest for an unusable image, and RouterError if the shards do not answer."""


class ImageEncoding:
    """Has the shards encode the images of requests, once per image, even if several requests have it."""

    def __init__(
        self,
        shards: ImageShards,
        ready: Callable[[Sequence], None],
        failed: Callable[[Sequence, RouterError], None],
        target_gap_ms: float,
        metrics: ImageMetrics,
    ) -> None:
        """ready: called with each sequence whose images are encoded. failed: called if its images cannot be encoded.

        target_gap_ms: target for the time between two tokens of other requests meanwhile; 0: the shards' default.
        """
        self._shards = shards
        self._metrics = metrics
        self._target_gap_ms = target_gap_ms
        self._ready = ready
        self._failed = failed
        self._images: dict[bytes, asyncio.Task[None]] = {}
        self._computed: dict[bytes, None] = {}  # digests, the last one computed at the end
        self._sequences: dict[int, tuple[Sequence, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def running(self) -> bool:
        """True while the shards encode an image."""
        return bool(self._images)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence, _ in self._sequences.values()])

    def get(self, request_id: int) -> Sequence | None:
        found = self._sequences.get(request_id)
        return None if found is None else found[0]

    def begin(self, sequence: Sequence, images: Iterable[Image]) -> None:
        """Starts to encode the images. `ready` or `failed` is called at the end."""
        waiting = asyncio.get_running_loop().create_task(self._wait(sequence, list(map(self._task, images))))
        self._sequences[sequence.id] = sequence, waiting

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence, if it is there. Its images are still encoded: other requests may have them, too."""
        found = self._sequences.pop(sequence.id, None)
        if found is not None:
            found[1].cancel()

    def close(self) -> None:
        for task in self._images.values():
            task.cancel()

    def _task(self, image: Image) -> asyncio.Task[None]:
        task = self._images.get(image.digest)
        if task is None:
            task = self._images[image.digest] = asyncio.get_running_loop().create_task(self._encode(image))
        return task

    async def _encode(self, image: Image) -> None:
        began = perf_counter()
        try:
            await self._compute(image)
            self._metrics.encoded(perf_counter() - began)
        except RouterError as error:
            self._metrics.failed(error.error_type)
            raise
        finally:
            del self._images[image.digest]

    async def _compute(self, image: Image) -> None:
        if image.digest in self._computed:
            with suppress(InvalidRequest):  # a shard has evicted it
                await self._shards.encode_images([replace(image, tensors=())], self._target_gap_ms)
                return
        await self._shards.encode_images([image], self._target_gap_ms)
        self._computed.pop(image.digest, None)
        self._computed[image.digest] = None
        if len(self._computed) > _RECENT:
            del self._computed[next(iter(self._computed))]

    async def _wait(self, sequence: Sequence, tasks: Iterable[asyncio.Task[None]]) -> None:
        fault: RouterError | None = None
        for task in tasks:
            await asyncio.wait([task])
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if isinstance(error, InvalidRequest):
                fault = fault or error
            elif error is not None:  # the step computes the image, or shows that the shards are not there
                logger.warning("an image was not computed before its request: %s", error)
        del self._sequences[sequence.id]
        if fault is None:
            self._ready(sequence)
        else:
            self._failed(sequence, fault)
