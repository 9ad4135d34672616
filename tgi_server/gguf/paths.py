"""Finds GGUF files by their names: parts of a model, and the file of an adapter. Imports no other package."""

import re
from pathlib import Path

SUFFIX = ".gguf"
# The file for `tensor_headers` in a folder that describes a GGUF file.
TENSORS = "gguf_tensors.json"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufError(ValueError):
    """Raised for a file that is damaged or not supported; the text says which file, and what to do."""


def gguf_parts(path: Path) -> list[Path]:
    """Returns all files of the model that a file belongs to, in order. Raises GgufError when one is missing."""
    match = _PART.fullmatch(path.name)
    count = int(match[3]) if match else 1
    if match and not 1 <= int(match[2]) <= count:
        raise GgufError(f"{path} has a name that no part of a model has: parts are numbered from 1; rename the file")
    names = (
        [f"{match[1]}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)] if match else [path.name]
    )
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise GgufError(f"there is no file {path.parent / missing[0]}" + ("; download all parts" if match else ""))
    return [path.parent / name for name in names]


def first_part(name: str) -> bool:
    """Returns False for a file that is a later part of a model."""
    match = _PART.fullmatch(name)
    return match is None or int(match[2]) == 1


def adapter_file(path: Path) -> Path | None:
    """Returns the GGUF file of an adapter: the path itself, or the one in a folder. None for adapters of peft.

    Raises GgufError for a folder with several.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if (path / "adapter_config.json").is_file():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise GgufError(f"{path} has several GGUF files; name one of them: {', '.join(file.name for file in files)}")
    return files[0] if files else None
