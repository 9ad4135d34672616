"""Prompts in the Alpaca style: an instruction, an input of labeled lines, and a heading for the answer to follow."""

import base64
import re
from collections.abc import Iterable, Sequence

# Characters of one value. A whole recipe in the place of a step must not push the instruction out of the prompt.
LONGEST_VALUE = 2000

# Characters of a value that are looked at, so that megabytes of white space cost nothing.
LONGEST_INPUT = 4 * LONGEST_VALUE

# How files of images begin, and what they are.
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
    """Returns the prompt for `instruction` about `text`."""
    return (
        _WITH_INPUT.format(instruction=instruction.strip(), text=text.strip())
        if text.strip()
        else _ALONE.format(instruction=instruction.strip())
    )


def labelled(*fields: tuple[str, str]) -> str:
    """Returns `Label: value` lines of the fields that are not blank.

    Values come from users, so each is kept to one line and cannot pass for one of the prompt's own headings, or for an
    image.
    """
    lines = [(label, one_line(value)) for label, value in fields]
    return "\n".join(f"{label}: {value}" for label, value in lines if value)


def one_line(value: str) -> str:
    line = " ".join(value[:LONGEST_INPUT].split()).replace("![](", "[](")
    return re.sub(r"#{2,}", "#", line)[:LONGEST_VALUE].rstrip()


def with_images(images: Iterable[bytes], prompt: str) -> str:
    """Returns the prompt after its images, which text-generation servers take as Markdown."""
    return "".join(f"![]({data_url(image)})" for image in images) + prompt


def data_url(image: bytes) -> str:
    """Returns the file of an image as a data URL."""
    kind = next((kind for beginning, kind in _MEDIA_TYPES.items() if image.startswith(beginning)), "image/png")
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def is_blank(value: str) -> bool:
    """Returns True if a prompt would show nothing of `value`."""
    return not value[:LONGEST_INPUT].strip()


def value_at(values: Sequence[str], index: int) -> str:
    """Returns the value at `index`, or an empty one: callers' parallel lists need not be equally long."""
    return values[index] if index < len(values) else ""
