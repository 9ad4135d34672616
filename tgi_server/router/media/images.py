"""The images of a request: fetched, processed (results are cached), and put into its prompt."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from tgi_server.contract import Image, Tensor
from tgi_server.router.errors import ContextOverflow, DecodingFailed, InvalidRequest, RouterError
from tgi_server.router.media.data_urls import data_of
from tgi_server.router.media.messages import UnusableImage
from tgi_server.router.media.sizes import stated_work
from tgi_server.router.metrics import ImageMetrics
from tgi_server.shared_bytes import SharedMemory

logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # a server of texts alone needs neither
    from tgi_server.router.media.fetching import Fetcher
    from tgi_server.router.media.workers import Workers

# Bytes of the processed images that are remembered.
_MOST_REMEMBERED = 512 * 2**20
# Bytes of tensors that a request may have in its calls to the shards, if these can read them from shared memory.
MOST_SENT = 4 * 2**20
_LEAST_PART = 4_096
# Of an image beside its tensors.
_OVERHEAD = 1_000

T = TypeVar("T")
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

    placeholder: the text that stands for it in a prompt. text: the text of its tokens. tokens: number of these that the
    vision tower's output replaces. digest: SHA-256 of the tensors and the namespace.
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


class Threads(Protocol):
    """Threads for work that takes time in proportion to a text."""

    def run(self, characters: int, work: Callable[[], T]) -> Awaitable[T]:
        """Returns what `work` returns, computed outside the event loop."""


class ImageAccount(Protocol):
    """Counts the bytes that are held for a request. Raises RouterError when there are too many."""

    def hold(self, size: int) -> None: ...

    def hold_once(self, name: bytes, size: int) -> None: ...

    def give_back(self, size: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ImageClient:
    """The sender of a request with images.

    name: the client's name; clients take turns. namespace: names the clients that may share computed images.
    """

    name: str
    namespace: str
    account: ImageAccount


@dataclass(frozen=True, slots=True)
class _File:
    """The file of an image. key: digest of the file, the detail and the namespace. work: stated pixels, times scans."""

    data: bytes
    detail: str
    namespace: str
    key: bytes
    work: int


@dataclass(slots=True)
class _Decoding:
    """An image that is being processed. waiting: requests that wait for it."""

    task: asyncio.Task[ProcessedImage]
    waiting: int = 0


class ImageReader:
    """Processes images for a model.

    token_id: the token that stands for an image in prompts, and its text. most_tokens: maximum tokens of a prompt.
    """

    def __init__(
        self,
        fetcher: "Fetcher",
        workers: "Workers",
        threads: Threads,
        token_id: int,
        token: str,
        most_tokens: int,
        metrics: ImageMetrics,
        *,
        shares_memory: bool = False,
    ) -> None:
        """shares_memory: the shards can read this process's memory."""
        self._metrics = metrics
        self._shares_memory = shares_memory
        self._fetcher = fetcher
        self._workers = workers
        self._threads = threads
        self._token_id = token_id
        self._token = token
        self._most_tokens = most_tokens
        self._remembered: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._bytes = 0
        self._running: dict[bytes, _Decoding] = {}

    async def read(self, sources: Sequence[ImageSource], client: ImageClient) -> tuple[ProcessedImage, ...]:
        """Returns the images, processed. An image that only cancelled requests wait for is not processed any further.

        Raises InvalidRequest for an image that cannot be used, and what the client's account raises.
        """
        images: list[ProcessedImage] = []
        tokens = len(sources)  # each has one at least
        for source in sources:
            if tokens > self._most_tokens:
                break
            self._metrics.received()
            try:
                image = await self._read(source, client)
            except RouterError as error:
                self._metrics.failed(error.error_type)
                raise
            client.account.hold_once(image.digest, image.size)
            images.append(image)
            tokens += image.tokens - 1
        if tokens > self._most_tokens:
            raise ContextOverflow.of_prompt(tokens, self._most_tokens, at_least=True)
        if self._shares_memory and (sent := sum(map(_sent, images))) > MOST_SENT:
            client.account.hold(sent)
            return tuple(await asyncio.to_thread(_shared, images))
        return tuple(images)

    def placed(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> tuple[Image, ...]:
        """Returns the images with their places among the tokens of a prompt. Raises InvalidRequest."""
        places = [place for place, token_id in enumerate(ids) if token_id == self._token_id] if images else []
        ends = list(accumulate(image.tokens for image in images)) or [0]
        if len(places) != ends[-1]:
            raise InvalidRequest(
                f"the prompt has {len(places)} image tokens ({self._token}), but its images need {ends[-1]}: do not "
                "write such tokens into messages"
            )
        placed: list[Image] = []
        for image, end in zip(images, ends, strict=False):
            first, last = places[end - image.tokens], places[end - 1]
            placed.append(Image(image.digest, first, last - first + 1, image.tensors))
        return tuple(placed)

    async def close(self) -> None:
        self._workers.close()
        await self._fetcher.close()

    async def _read(self, source: ImageSource, client: ImageClient) -> ProcessedImage:
        """Raises InvalidRequest or DecodingFailed."""
        try:
            with _held(client.account) as hold:
                file = await self._file(source, client, hold)
                return await self._processed(file, client.name)
        except UnusableImage as error:
            raise InvalidRequest(f"`{source.place}`: the image cannot be used: {error}", param=source.place) from None
        except DecodingFailed as error:
            raise DecodingFailed(f"`{source.place}`: {error}") from None

    async def _file(self, source: ImageSource, client: ImageClient, hold: Callable[[int], None]) -> _File:
        """Returns the file of an image. hold: counts its bytes before they are there. Raises UnusableImage."""
        detail = "low" if source.detail == "low" else "auto"

        def described(data: bytes) -> _File:
            digest = sha256(f"{client.namespace}\0{detail}\0".encode())
            digest.update(data)
            return _File(data, detail, client.namespace, digest.digest(), stated_work(data))

        if source.url[:5].lower() == "data:":
            hold(len(source.url) * 3 // 4)  # of base64
            return await self._threads.run(len(source.url), lambda: described(data_of(source.url)))
        data = await self._fetcher.fetch(source.url, client.name, hold)
        return await self._threads.run(len(data), lambda: described(data))

    async def _processed(self, file: _File, client: str) -> ProcessedImage:
        if (image := self._remembered.get(file.key)) is not None:
            self._remembered.move_to_end(file.key)
            self._metrics.processed(image.tokens, known=True)
            return image
        decoding = self._running.get(file.key)
        known = decoding is not None
        if decoding is None:
            decoding = self._running[file.key] = _Decoding(asyncio.create_task(self._process(file, client)))
            decoding.task.add_done_callback(lambda _: self._ended(file.key, decoding))
        image = await self._wait(file.key, decoding)
        self._metrics.processed(image.tokens, known=known)
        return image

    async def _wait(self, key: bytes, decoding: _Decoding) -> ProcessedImage:
        """Returns the image. If all its clients have left, its processing ends before this does."""
        decoding.waiting += 1
        try:
            return await asyncio.shield(decoding.task)
        finally:
            decoding.waiting -= 1
            if not decoding.waiting and not decoding.task.done():
                self._forget(key, decoding)
                decoding.task.cancel()
                await asyncio.wait((decoding.task,))

    def _ended(self, key: bytes, decoding: _Decoding) -> None:
        self._forget(key, decoding)
        if not decoding.task.cancelled():
            decoding.task.exception()  # its clients may have left

    def _forget(self, key: bytes, decoding: _Decoding) -> None:
        """Makes later requests start over."""
        if self._running.get(key) is decoding:
            del self._running[key]

    async def _process(self, file: _File, client: str) -> ProcessedImage:
        began = perf_counter()
        result, tensors = await self._workers.process(file.data, file.detail, client, file.work)
        self._metrics.decoded(perf_counter() - began)
        tokens = result.text.count(self._token)
        if not tokens:
            raise UnusableImage(f"the model's processor returned no token {self._token} for it")
        digest = await asyncio.to_thread(_digest, file.namespace, tensors)
        image = ProcessedImage(result.placeholder, result.text, tokens, digest, tensors)
        self._remember(file.key, image)
        return image

    def _remember(self, key: bytes, image: ProcessedImage) -> None:
        """Caches an image, and evicts the least recently used ones."""
        self._remembered[key] = image
        self._bytes += image.size
        while self._bytes > _MOST_REMEMBERED:
            self._bytes -= self._remembered.popitem(last=False)[1].size


@contextmanager
def _held(account: ImageAccount) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts bytes until the context ends."""
    held = 0

    def hold(size: int) -> None:
        nonlocal held
        account.hold(size)
        held += size

    try:
        yield hold
    finally:
        account.give_back(held)


def _sent(image: ProcessedImage) -> int:
    """Returns the bytes of an image's tensors that are in no shared memory, so that calls to the shards have them."""
    return sum(len(tensor.data) for tensor in image.tensors if isinstance(tensor.data, bytes))


def _digest(namespace: str, tensors: Sequence[Tensor]) -> bytes:
    """Returns the digest by which an image is known from here on, to those who may know of each other's images."""
    digest = sha256(f"{namespace}\0".encode())
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data if isinstance(tensor.data, bytes) else tensor.data.map())
    return digest.digest()


def _shared(images: Sequence[ProcessedImage]) -> Sequence[ProcessedImage]:
    """Returns images whose tensors are in one shared memory, as far as they were in none."""
    parts = [
        tensor.data
        for image in images
        for tensor in image.tensors
        if isinstance(tensor.data, bytes) and len(tensor.data) >= _LEAST_PART
    ]
    try:
        copies = iter(SharedMemory.of(parts))
    except OSError as error:
        logger.warning("image tensors are copied to the shards, because shared memory is not available: %s", error)
        return images
    return [
        replace(
            image,
            tensors=tuple(
                replace(tensor, data=next(copies))
                if isinstance(tensor.data, bytes) and len(tensor.data) >= _LEAST_PART
                else tensor
                for tensor in image.tensors
            ),
        )
        for image in images
    ]
