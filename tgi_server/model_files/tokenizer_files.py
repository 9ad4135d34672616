"""Files of tokenizers and chat templates, and model folders that use those of another folder."""

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import constants

from tgi_server.model_files.copies import TEMPLATES, files_path, storage_hint, unfinished_folder
from tgi_server.model_files.errors import ModelUnavailable

# Every tokenizer has one of these files.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
PATTERNS = (
    *(*TOKENIZERS, "merges.txt", "*.tiktoken", "added_tokens.json", "special_tokens_map.json"),
    *("tokenizer_config.json", "chat_template.json", TEMPLATES, f"additional_chat_templates/{TEMPLATES}"),
)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of the tokenizer in a folder, and those of its chat templates."""
    return sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})


def with_tokenizer(model: Path, tokenizer: Path) -> Path:
    """Returns a folder of links to a model's files, and to another folder's tokenizer and chat templates.

    Raises ModelUnavailable if it cannot be made.
    """
    own, others = tokenizer_files(model), tokenizer_files(tokenizer)
    kept = [file for file in sorted(model.rglob("*")) if file.is_file() and file not in own]
    folder = files_path("tokenizers", model.name, [*kept, *others])
    if folder.is_dir():
        return folder
    try:
        with unfinished_folder(folder) as whole:
            _link(kept, model, whole)
            _link(others, tokenizer, whole)
    except OSError as error:
        hint = storage_hint(error, constants.HF_HUB_CACHE)
        raise ModelUnavailable(
            f"no folder of {model} with the tokenizer of {tokenizer} can be written: {error.strerror or error}{hint}"
        ) from error
    return folder


def _link(files: Iterable[Path], folder: Path, target: Path) -> None:
    for file in files:
        link = target / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
