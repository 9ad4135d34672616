"""Folders in transformers format for GGUF files, in the hub's cache: configuration, tokenizer, and links to weights."""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import constants

from tgi_server import gguf
from tgi_server.gguf.paths import SUFFIX, TENSORS, GgufError, first_part, gguf_parts
from tgi_server.model_files.copies import files_path, storage_hint, unfinished_folder
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.tokenizer_files import tokenizer_files

logger = logging.getLogger(__name__)

# If this file is beside a GGUF file, the tokenizer of that folder replaces the one in the file.
_TOKENIZER = "tokenizer.json"
_READER = Path(gguf.__file__).parent
# How sentence-transformers says that a model embeds texts.
_POOLING = PurePath("1_Pooling/config.json")


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """Chooses the GGUF file of a folder or a repository.

    name: name of the file (`--gguf-file`). kind: its quantization as in file names (OWNER/REPOSITORY:KIND). If both are
    None, there must be only one file.
    """

    name: str | None = None
    kind: str | None = None

    def __bool__(self) -> bool:
        return bool(self.name or self.kind)

    @property
    def patterns(self) -> list[str]:
        """Returns patterns of the hub's client for the files that may be meant."""
        if self.name is not None:
            return [re.sub(r"-\d{5}-of-", "-*-of-", self.name)]
        kind = "".join(f"[{each.lower()}{each.upper()}]" if each.isalpha() else each for each in self.kind or "")
        return [f"*{kind}{SUFFIX}", f"*{kind}-*-of-*{SUFFIX}"]

    def of(self, names: Iterable[str], place: str) -> str | None:
        """Returns the chosen one of file names, with their folders; None if there are no GGUF files.

        Of a model in several files it is the first. place: that of the files, for people. Raises ModelUnavailable.
        """
        models = sorted(name for name in names if name.endswith(SUFFIX) and first_part(PurePath(name).name))
        models = [name for name in models if not PurePath(name).name.startswith("mmproj")]  # which read images
        found = [name for name in models if self._fits(name)]
        if len(found) == 1 or not (models or self):
            return found[0] if found else None
        wanted = f"--gguf-file {self.name}" if self.name else self.kind
        what = "has several GGUF files" if found else f"has no GGUF file {wanted}" if models else "has no GGUF files"
        advice = f"; choose one with --gguf-file: {', '.join(models)}" if models else ""
        raise ModelUnavailable(f"{place} {what}{advice}")

    def _fits(self, name: str) -> bool:
        if self.name is not None:
            return name == self.name
        pattern = rf"(?:.*[-._/])?{re.escape(self.kind or '')}(?:-\d{{5}}-of-\d{{5}})?\.gguf"
        return self.kind is None or re.fullmatch(pattern, name, re.IGNORECASE) is not None


def split_kind(model_id: str) -> tuple[str, str | None]:
    """Splits `model_id` at its colon into an id of the hub and the quantization of the model's file; None: no colon."""
    repository, _, kind = model_id.partition(":")
    return repository, kind or None


def gguf_of_folder(folder: Path, choice: GgufChoice) -> Path | None:
    """Returns the GGUF file that is the model of a folder; None if it is another model. Raises ModelUnavailable."""
    others = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if others and not choice:
        return None
    names = [str(file.relative_to(folder)) for file in folder.glob(f"**/*{SUFFIX}")]
    name = choice.of(names, str(folder))
    return None if name is None else folder / name


def is_gguf_adapter(file: Path) -> bool:
    """Returns True for an adapter. Raises ModelUnavailable for a file that is damaged."""
    from tgi_server.gguf.file import read_gguf

    try:
        return read_gguf(file, texts=False).is_adapter
    except GgufError as error:
        raise ModelUnavailable(str(error)) from error


def described(file: Path, tokenizer: Path | None = None) -> Path:
    """Returns a folder in transformers format for a GGUF file, which it makes if it is not there yet.

    Its weights are links to the file and its other parts. tokenizer: a folder whose tokenizer is used. Raises
    ModelUnavailable.
    """
    try:
        parts, others, folder = _description(file, tokenizer)
        if not folder.is_dir():
            logger.info("describing %s in %s", parts[0], folder)
            source = tokenizer or parts[0].parent
            _describe(parts, {file.relative_to(source): file for file in others}, folder)
    except GgufError as error:
        raise ModelUnavailable(str(error)) from error
    except OSError as error:
        hint = storage_hint(error, constants.HF_HUB_CACHE)
        raise ModelUnavailable(
            f"no configuration can be written for {file}: {error.strerror or error}{hint}"
        ) from error
    return folder


def known_description(file: Path) -> Path | None:
    """Returns the folder that `described` has made for a GGUF file; None if there is none, or if it is not known."""
    try:
        _, _, folder = _description(file, None)
    except (GgufError, OSError):
        return None  # `described` raises the error
    return folder if folder.is_dir() else None


def _description(file: Path, tokenizer: Path | None) -> tuple[Sequence[Path], Sequence[Path], Path]:
    """Returns the parts of a GGUF file, the files of another tokenizer, and the folder that describes them.

    Raises GgufError and OSError.
    """
    parts = gguf_parts(file)
    source = tokenizer or parts[0].parent
    others = tokenizer_files(source) if tokenizer or (source / _TOKENIZER).is_file() else []
    return parts, others, files_path("gguf", parts[0].stem, [*parts, *others], _code())


@cache
def _code() -> bytes:
    """Returns a digest of the code that reads GGUF files: a later version of it may describe them better."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(_READER.glob("*.py")))).digest()


def _describe(parts: Sequence[Path], tokenizer: Mapping[Path, Path], folder: Path) -> None:
    """Writes the folder. tokenizer: files of another tokenizer, by their names in the folder."""
    # These import numpy and gguf, which a folder that is known does not need.
    from tgi_server.gguf.architectures import config_of, tensor_headers
    from tgi_server.gguf.configuration import pooling
    from tgi_server.gguf.file import read_gguf
    from tgi_server.gguf.metadata import Metadata
    from tgi_server.gguf.tokenizer import Vocabulary, tokenizer_config, tokenizer_json

    model = read_gguf(parts[0])
    contents: dict[str, Any] = {"config.json": config_of(model), TENSORS: tensor_headers(model)}
    if own := pooling(Metadata(model)):
        modules = [("", "Transformer"), (_POOLING.parent.name, "Pooling")]
        kinds = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in modules]
        contents |= {"modules.json": kinds, str(_POOLING): own}
    if tokenizer:
        ends = [contents["config.json"]["eos_token_id"]]
    else:
        words = Vocabulary(model)
        contents |= {_TOKENIZER: tokenizer_json(words), "tokenizer_config.json": tokenizer_config(words)}
        ends = words.end_ids()
    contents["generation_config.json"] = {"eos_token_id": ends} if any(ending is not None for ending in ends) else {}
    with unfinished_folder(folder) as whole:
        for name, content in contents.items():
            (whole / name).parent.mkdir(exist_ok=True)
            (whole / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for place, file in tokenizer.items():
            (whole / place).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, whole / place)
        for file in parts:
            (whole / file.name).symlink_to(file.resolve())
