"""The model's folder: found here, or fetched from the hub."""

import asyncio
import os
import sys
from pathlib import Path

from tgi_server.launcher import commands
from tgi_server.launcher.errors import CannotStartError, ModelMissingError
from tgi_server.launcher.processes.child import die_with_parent
from tgi_server.launcher.settings import LauncherSettings

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


async def find_model(settings: LauncherSettings) -> Path:
    """Returns the model's folder. Fetches from the hub what is not here yet, and converts `.bin` weights.

    Raises ModelMissingError when that cannot be done.
    """
    return _ready_folder(settings.model_id) or await _download(settings)


def check_tokenizer(folder: Path) -> None:
    """Raises CannotStartError when the model's folder has no tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise CannotStartError(
            f"{folder} has neither a tokenizer.json nor a tokenizer of an older kind; add the tokenizer's files"
        )


def _ready_folder(model_id: str) -> Path | None:
    """Returns the folder when it has all that a shard reads; None when something has to be fetched or converted."""
    folder = Path(model_id).expanduser()
    weights = [file for file in folder.glob("*.safetensors") if file.name != ADAPTER_WEIGHTS]
    return folder if (folder / "config.json").is_file() and weights else None


async def _download(settings: LauncherSettings) -> Path:
    """Runs `text-generation-server download-weights`, which shows its progress on the terminal."""
    command = commands.download(settings)
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
        env={**os.environ, **command.environment},
        preexec_fn=die_with_parent(),
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode:
        raise ModelMissingError(process.returncode)
    return Path(output.decode().splitlines()[-1])
