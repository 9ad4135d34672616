"""Images are computed before their requests are queued, each once."""

import asyncio
from collections.abc import Iterable

from tests.fakes.recording_sink import recorded_request
from tests.timing import eventually
from tgi_server.contract import Image, Tensor
from tgi_server.router.errors import InvalidRequest, RouterError, Unhealthy
from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling.image_encoding import ImageEncoding
from tgi_server.router.scheduling.sequence import Sequence


class EncodingShards:
    """Computes images when they are let; fails with `error`, if there is one."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.let = asyncio.Event()
        self.error: RouterError | None = None

    async def encode_images(self, images: Iterable[Image], target_gap_ms: float) -> None:
        self.asked += [image.digest for image in images]
        await self.let.wait()
        if self.error is not None:
            raise self.error


def sequence(request_id: int) -> Sequence:
    return Sequence(*recorded_request(request_id, [1, 2, 3], 8))


async def test_requests_with_the_same_image_wait_for_one_computation() -> None:
    shards, ready = EncodingShards(), list[int]()
    encoding = ImageEncoding(shards, lambda each: ready.append(each.id), lambda *_: None, 0.0, Metrics().images)
    one, other = Image(b"1", 0, 2, ()), Image(b"2", 0, 2, ())
    encoding.begin(sequence(1), [one])
    encoding.begin(sequence(2), [one, other])
    encoding.begin(sequence(3), [one])
    left = encoding.get(3)
    assert left is not None
    encoding.leave(left)
    await eventually(lambda: len(shards.asked) == 2)
    assert (sorted(shards.asked), ready) == ([b"1", b"2"], [])
    shards.let.set()
    await eventually(lambda: len(ready) == 2)
    assert (sorted(ready), len(encoding)) == ([1, 2], 0)


async def test_an_image_that_shards_refuse_fails_its_request_and_other_faults_do_not() -> None:
    shards, ready, failed = EncodingShards(), list[int](), list[str]()
    encoding = ImageEncoding(
        shards,
        lambda each: ready.append(each.id),
        lambda each, error: failed.append(f"{each.id} {error}"),
        0.0,
        Metrics().images,
    )
    shards.let.set()
    shards.error = InvalidRequest("too large")
    encoding.begin(sequence(1), [Image(b"1", 0, 2, ())])
    await eventually(lambda: failed == ["1 too large"])
    shards.error = Unhealthy("gone")  # the queue finds out
    encoding.begin(sequence(2), [Image(b"1", 0, 2, ())])
    await eventually(lambda: ready == [2])


class RememberingShards:
    """Have the images that they have computed until they evict them."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.sent: list[int] = []

    async def encode_images(self, images: Iterable[Image], target_gap_ms: float) -> None:
        for image in images:
            self.sent.append(len(image.tensors))
            if not image.tensors and image.digest not in self.known:
                raise InvalidRequest("an image that has to be computed has no tensor pixel_values")
            self.known.add(image.digest)


async def test_pixels_of_an_image_are_sent_again_only_if_the_shards_have_evicted_it() -> None:
    shards, ready = RememberingShards(), list[int]()
    encoding = ImageEncoding(shards, lambda each: ready.append(each.id), lambda *_: None, 0.0, Metrics().images)
    image = Image(b"1", 0, 2, (Tensor("pixel_values", "float32", (1,), bytes(4)),))
    for request_id in (1, 2, 3):
        if request_id == 3:
            shards.known.clear()
        encoding.begin(sequence(request_id), [image])
        await eventually(lambda expected=request_id: expected in ready)  # type: ignore[misc]
    assert shards.sent == [1, 0, 0, 1]
