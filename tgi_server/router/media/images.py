"""The images of a request: fetched, processed once for as long as they are remembered, and put into its prompt."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from tgi_server.contract import Image, Tensor
from tgi_server.router.errors import ContextOverflow, DecodingFailed, InvalidRequest, RouterError
from tgi_server.router.media.messages import UnusableImage
from tgi_server.router.metrics import ImageMetrics

if TYPE_CHECKING:  # a server of texts alone needs neither
    from tgi_server.router.media.fetching import Fetcher
    from tgi_server.router.media.workers import Workers

# Bytes of the processed images that are remembered.
_MOST_REMEMBERED = 512 * 2**20
# Of an image beside its tensors.
_OVERHEAD = 1_000

Detail = Literal["auto", "low", "high", "original"]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a request has it. place: where, as in `messages[1].content[0]`. detail: OpenAI's."""

    url: str
    place: str
    detail: Detail = "auto"


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image after the model's image processor.

    placeholder: the text that stands for it in a prompt. text: the text of its tokens. tokens: how many of these get
    what the model sees. digest: SHA-256 of the tensors.
    """

    placeholder: str
    text: str
    tokens: int
    digest: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return _OVERHEAD + len(self.text) + sum(len(tensor.data) for tensor in self.tensors)


class ImageReader:
    """Processes images for a model.

    token_id: the token in whose places the model sees an image, and its text. most_tokens: of a prompt.
    """

    def __init__(
        self,
        fetcher: "Fetcher",
        workers: "Workers",
        token_id: int,
        token: str,
        most_tokens: int,
        metrics: ImageMetrics,
    ) -> None:
        self._metrics = metrics
        self._fetcher = fetcher
        self._workers = workers
        self._token_id = token_id
        self._token = token
        self._most_tokens = most_tokens
        self._remembered: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._bytes = 0
        self._running: dict[bytes, asyncio.Task[ProcessedImage]] = {}

    async def read(self, sources: Sequence[ImageSource], hold: Callable[[int], None]) -> tuple[ProcessedImage, ...]:
        """Returns the images, processed. hold: counts the bytes that are held for the request.

        Raises InvalidRequest for an image that cannot be used, and what `hold` raises.
        """
        images: list[ProcessedImage] = []
        for source in sources:
            self._metrics.received()
            try:
                image = await self._read(source)
            except RouterError as error:
                self._metrics.failed(error.error_type)
                raise
            hold(image.size)
            images.append(image)
            if (tokens := sum(each.tokens for each in images)) > self._most_tokens:
                raise ContextOverflow.of_prompt(tokens, self._most_tokens, at_least=True)
        return tuple(images)

    def placed(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> tuple[Image, ...]:
        """Returns the images with their places among the tokens of a prompt. Raises InvalidRequest."""
        places = [place for place, token_id in enumerate(ids) if token_id == self._token_id] if images else []
        if len(places) != sum(image.tokens for image in images):
            raise InvalidRequest(
                f"the prompt has {len(places)} tokens of images ({self._token}), and its images have "
                f"{sum(image.tokens for image in images)}: leave the text of such tokens out of the messages"
            )
        placed: list[Image] = []
        for image in images:
            own, places = places[: image.tokens], places[image.tokens :]
            placed.append(Image(image.digest, own[0], own[-1] - own[0] + 1, image.tensors))
        return tuple(placed)

    async def close(self) -> None:
        self._workers.close()
        await self._fetcher.close()

    async def _read(self, source: ImageSource) -> ProcessedImage:
        """Raises InvalidRequest or DecodingFailed."""
        try:
            data = await self._fetcher.fetch(source.url)
            return await self._processed(data, "low" if source.detail == "low" else "auto")
        except UnusableImage as error:
            raise InvalidRequest(f"`{source.place}`: the image cannot be used: {error}", param=source.place) from None
        except DecodingFailed as error:
            raise DecodingFailed(f"`{source.place}`: {error}") from None

    async def _processed(self, data: bytes, detail: str) -> ProcessedImage:
        key = await asyncio.to_thread(lambda: sha256(detail.encode() + b"\0" + data).digest())
        if (image := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            self._metrics.processed(image.tokens, known=True)
            return image
        known = key in self._running
        task = self._running.get(key)
        if task is None:
            # A request that is cancelled does not cancel it: others may wait for the same image.
            task = self._running[key] = asyncio.create_task(self._process(key, data, detail))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        image = await asyncio.shield(task)
        self._metrics.processed(image.tokens, known=known)
        return image

    async def _process(self, key: bytes, data: bytes, detail: str) -> ProcessedImage:
        began = perf_counter()
        try:
            result, tensors = await self._workers.process(data, detail)
            self._metrics.decoded(perf_counter() - began)
            tokens = result.text.count(self._token)
            if not tokens:
                raise UnusableImage(f"the model's processor makes no token {self._token} of it")
            digest = await asyncio.to_thread(_digest, tensors)
            image = ProcessedImage(result.placeholder, result.text, tokens, digest, tensors)
            self._remember(key, image)
            return image
        finally:
            del self._running[key]

    def _remember(self, key: bytes, image: ProcessedImage) -> None:
        """Remembers an image, and forgets those that were not used for the longest time."""
        self._remembered[key] = image
        self._bytes += image.size
        while self._bytes > _MOST_REMEMBERED:
            self._bytes -= self._remembered.popitem(last=False)[1].size


def _digest(tensors: Sequence[Tensor]) -> bytes:
    digest = sha256()
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data)
    return digest.digest()
