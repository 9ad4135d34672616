"""Prompts in the Alpaca style: an instruction, optionally an input, and a heading for the answer to follow."""

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
    """The prompt for `instruction` about `text`."""
    return (
        _WITH_INPUT.format(instruction=instruction.strip(), text=text.strip())
        if text.strip()
        else _ALONE.format(instruction=instruction.strip())
    )
