"""Where the model's files are."""

import asyncio
import os
import sys
from pathlib import Path

from tgi_server.launcher import commands
from tgi_server.launcher.errors import ModelMissingError
from tgi_server.launcher.processes.parent import die_with_parent
from tgi_server.launcher.settings import LauncherSettings


async def find_model(settings: LauncherSettings) -> Path:
    """The model's folder; what is not here yet is fetched from the hub, and `.bin` weights are converted.

    Raises ModelMissingError when that cannot be done.
    """
    return _ready_folder(settings.model_id) or await _download(settings)


def _ready_folder(model_id: str) -> Path | None:
    folder = Path(model_id).expanduser()
    return folder if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None


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
