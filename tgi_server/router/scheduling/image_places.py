"""The places of a prompt's images among its tokens."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import shake_128

from tgi_server.contract import Image

# Tokens of an image that is computed in one step, beside all others that a step may have.
MOST_WHOLE = 1536
_WIDTH = 4  # bytes of a token
# Of an image, what its size does not depend on. Without it the message of an image is small.
_PIXELS = "pixel_values"


class ImagePlaces:
    """The images of one prompt, in the order of their tokens, and which tokens are theirs."""

    def __init__(self, images: Sequence[Image]) -> None:
        self._images = images
        self._keys = [(image.start * _WIDTH, _keys_of(image)) for image in images]

    def keyed(self, text: bytes) -> bytes:
        """Returns the first tokens of the prompt, 4 bytes each, with what images show in the places of their tokens."""
        if not self._keys:
            return text
        keyed = bytearray(text)
        for start, keys in self._keys:
            keyed[start : start + len(keys)] = keys[: max(len(keyed) - start, 0)]
        return bytes(keyed)

    def outside(self, tokens: int) -> int:
        """Returns how many of the first tokens there are before the image that `tokens` ends in, if it ends in one."""
        inside = (image.start for image in self._images if image.start < tokens < image.start + image.length)
        return next(inside, tokens)

    def whole(self, start: int, tokens: int) -> int:
        """Returns how many tokens to compute from `start` on, about `tokens`, so that no image is cut."""
        end = self.outside(start + tokens)
        if end <= start:
            end = next(image.start + image.length for image in self._images if image.start == end)
        return end - start

    def messages(self, cached: int) -> list[Image]:
        """Returns the images for the shards, those within the first `cached` tokens without their pixels."""
        return [
            replace(image, tensors=tuple(tensor for tensor in image.tensors if tensor.name != _PIXELS))
            if image.start + image.length <= cached
            else image
            for image in self._images
        ]


def _keys_of(image: Image) -> bytes:
    """Returns numbers instead of an image's tokens: others for each image, and none that is a token."""
    size = image.length * _WIDTH
    keys = int.from_bytes(shake_128(image.digest).digest(size), "little")
    return (keys | int.from_bytes(b"\0\0\0\x80" * image.length, "little")).to_bytes(size, "little")
