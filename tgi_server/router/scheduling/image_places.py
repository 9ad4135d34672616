"""The places of a prompt's images among its tokens."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import shake_128

from tgi_server.contract import Image

# Maximum number of tokens of an image that has to be computed in one step.
MOST_WHOLE = 1536
_WIDTH = 4  # bytes of a token
# The tensor with an image's pixels, which nothing but their computation needs. Without it the message is small.
_PIXELS = "pixel_values"


class ImagePlaces:
    """The images of one prompt, in order, and the positions of their tokens."""

    def __init__(self, images: Sequence[Image]) -> None:
        self._images = images
        self._keys = [(image.start * _WIDTH, _keys_of(image)) for image in images]

    def keyed(self, text: bytes) -> bytes:
        """Returns `text`, the prompt's first tokens, 4 bytes each, with image digests in place of image tokens."""
        if not self._keys:
            return text
        keyed = bytearray(text)
        for start, keys in self._keys:
            keyed[start : start + len(keys)] = keys[: max(len(keyed) - start, 0)]
        return bytes(keyed)

    def outside(self, tokens: int) -> int:
        """Returns the largest number of first tokens, at most `tokens`, that does not end inside an image."""
        inside = (image.start for image in self._images if image.start < tokens < image.start + image.length)
        return next(inside, tokens)

    def whole(self, start: int, tokens: int) -> int:
        """Returns how many tokens to compute from `start` on, about `tokens`, so that no image is split."""
        end = self.outside(start + tokens)
        if end <= start:
            end = next(image.start + image.length for image in self._images if image.start == end)
        return end - start

    def messages(self, cached: int) -> list[Image]:
        """Returns the images for the shards; images within the first `cached` tokens come without pixels."""
        return [
            replace(image, tensors=tuple(tensor for tensor in image.tensors if tensor.name != _PIXELS))
            if image.start + image.length <= cached
            else image
            for image in self._images
        ]


def _keys_of(image: Image) -> bytes:
    """Returns numbers that replace an image's tokens, 4 bytes each: derived from its digest, and never token ids."""
    size = image.length * _WIDTH
    keys = int.from_bytes(shake_128(image.digest).digest(size), "little")
    return (keys | int.from_bytes(b"\0\0\0\x80" * image.length, "little")).to_bytes(size, "little")
