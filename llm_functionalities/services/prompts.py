"""Prompts in the Alpaca style: an instruction, an input of labeled lines, and a heading for the answer to follow."""

import base64
import re
from collections.abc import Iterable, Sequence

# The most characters of one value, so that a recipe in the place of a step does not push the instruction out.
LONGEST_VALUE = 2000

# The most characters of a value that are read, so that megabytes of white space take no time.
LONGEST_INPUT = 4 * LONGEST_VALUE

# The media types of image files by their first bytes.
_MEDIA_TYPES = {b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp", b"BM": "image/bmp"}

_WITH_INPUT = """\
Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Input:
{text}

### Response:
"""

_ALONE = """\
Below is an instruction that describes a task. Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Response:
"""


def alpaca(instruction: str, text: str = "") -> str:
    """Returns a prompt in the Alpaca style: `instruction`, with `text` as its input unless it is blank."""
    return (
        _WITH_INPUT.format(instruction=instruction.strip(), text=text.strip())
        if text.strip()
        else _ALONE.format(instruction=instruction.strip())
    )


def labelled(*fields: tuple[str, str]) -> str:
    """Returns a line `label: value` for each field that is not blank.

    Values come from users. Each is put on one line, without marks of headings and images, so that the model does not
    take it for a part of the prompt's own structure.
    """
    lines = [(label, one_line(value)) for label, value in fields]
    return "\n".join(f"{label}: {value}" for label, value in lines if value)


def one_line(value: str) -> str:
    line = " ".join(value[:LONGEST_INPUT].split()).replace("![](", "[](")
    return re.sub(r"#{2,}", "#", line)[:LONGEST_VALUE].rstrip()


def with_images(images: Iterable[bytes], prompt: str) -> str:
    """Returns `prompt` with the images before it in Markdown, as text-generation servers take them."""
    return "".join(f"![]({data_url(image)})" for image in images) + prompt


def data_url(image: bytes) -> str:
    """Returns an image file as a data URL."""
    kind = next((kind for beginning, kind in _MEDIA_TYPES.items() if image.startswith(beginning)), "image/png")
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def is_blank(value: str) -> bool:
    """Returns True if `value` would be blank in a prompt."""
    return not value[:LONGEST_INPUT].strip()


def value_at(values: Sequence[str], index: int) -> str:
    """Returns the value at `index`; "" beyond the end, because the parallel lists of a request may differ in length."""
    return values[index] if index < len(values) else ""
