"""Messages between the router and the processes that decode images (`shared/pipes.py`)."""

import msgspec


class ImageTask(msgspec.Struct):
    """An image to process. size: bytes of its file, which follow. detail: low, high or auto."""

    size: int
    detail: str


class ImageArray(msgspec.Struct):
    """An array of a result, in row-major order.

    start: its place in shared memory; None: it follows the result.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    start: int | None = None


class ImageResult(msgspec.Struct):
    """The answer of a process: an image for the model, or why there is none.

    error: why it cannot be used. placeholder: the text that stands for an image in a prompt. text: the text that
    replaces it. arrays: the image's tensors, which follow in this order. descriptor, inode: those of the shared memory
    that holds some of the tensors; the process keeps it open until it receives a byte.
    """

    error: str = ""
    placeholder: str = ""
    text: str = ""
    arrays: list[ImageArray] = msgspec.field(default_factory=list)
    descriptor: int = -1
    inode: int = 0


class UnusableImage(Exception):
    """An image cannot be had, or read. `str()` of it is the reason, which follows the name of the image."""
