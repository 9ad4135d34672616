"""The folders of the model and of adapters: found here, or fetched from the hub."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.processes import die_with_parent
from tgi_server.gguf.paths import SUFFIX, GgufError, adapter_file
from tgi_server.launcher import commands
from tgi_server.launcher.errors import CannotStartError, ModelMissingError
from tgi_server.launcher.preflight import ADAPTER_CONFIG, read_object
from tgi_server.launcher.processes.child import Command
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.model_files.ready_models import complete_folder, ready_model
from tgi_server.router.adapter_source import AdapterSource

logger = logging.getLogger(__name__)

_ENCODERS = {"embedding_model_id": "an embedding model", "rerank_model_id": "a rerank model"}
# Parts of `model_type` of models that only read texts.
_READERS = ("bert", "electra", "mpnet")

# Variables that name the folder of what is fetched and converted; without them it is in the user's home.
_CACHES = frozenset({"HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"})


async def find_model(settings: LauncherSettings) -> Path:
    """Returns the model's folder. Fetches missing files from the hub, and converts `.bin` weights.

    If the model id names Medusa heads, it is the folder of the model that they were made for; if it names a GGUF file,
    a folder that describes it. Raises ModelMissingError if files cannot be fetched or converted, and CannotStartError
    for a local folder without a model.
    """
    _check_local(settings.model_id)
    folder = ready_model(settings.model_id, settings.gguf_file, settings.tokenizer_name, settings.huggingface_hub_cache)
    return folder or await _download(commands.download(settings, settings.model_id))


def recognized(settings: LauncherSettings, folder: Path) -> LauncherSettings:
    """Returns settings for the kind of the model by its files: a model that generates, embeds or ranks.

    Raises CannotStartError if another model is to embed, or to rank, in its place, or if its config.json is damaged.
    """
    name = _encoder_setting(folder) if settings.generates else None
    if name is None:
        return settings
    what, flag = _ENCODERS[name], f"--{name.replace('_', '-')}"
    if (other := getattr(settings, name)) is not None:
        raise CannotStartError(f"--model-id: {settings.model_id} is {what}, and {flag} names another one, {other}")
    logger.info("%s is %s, by its files, and is served as with %s", settings.model_id, what, flag)
    return settings.model_copy(update={name: settings.model_id})


def _encoder_setting(folder: Path) -> str | None:
    """Returns the name of the setting for a model that embeds or ranks; None for one that generates."""
    config = read_object(folder / "config.json")
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith("ForSequenceClassification"):
        return "rerank_model_id"
    if (folder / "modules.json").is_file():  # sentence-transformers'
        return "embedding_model_id"
    if not any(part in str(config.get("model_type")) for part in _READERS) or "LMHead" in name:
        return None
    return "embedding_model_id" if not name or name.endswith(("Model", "ForMaskedLM", "ForPreTraining")) else None


async def fetch_further_models(settings: LauncherSettings) -> None:
    """Fetches the models that draft, embed and rank, if there are any, in the same way. Raises LauncherError."""
    for encoder in filter(None, (settings.embedding_model_id, settings.rerank_model_id)):
        _check_local(encoder)
    for model in filter(None, (settings.speculative_model, settings.embedding_model_id, settings.rerank_model_id)):
        if not complete_folder(model):
            await _download(commands.download(settings, model))


async def find_adapters(settings: LauncherSettings) -> list[AdapterSource]:
    """Returns the adapters of --lora-adapters, each with its folder, or its GGUF file. Fetches from the hub what is not
    here yet.

    Raises CannotStartError for a folder that has no adapter, and ModelMissingError when one cannot be fetched.
    """
    found = []
    for adapter in settings.lora_adapters:
        place = adapter.path or await _download(commands.download_adapter(settings, adapter))
        try:
            file = adapter_file(place)
        except GgufError as error:
            raise CannotStartError(f"--lora-adapters: {adapter.id}: {error}") from None
        if file is not None and not file.is_file():
            raise CannotStartError(f"--lora-adapters: {adapter.id}: there is no file {file}")
        if file is None and not (place / ADAPTER_CONFIG).is_file():
            nothing = f"{place} has neither an {ADAPTER_CONFIG} nor a GGUF file"
            why = nothing if place.is_dir() else f"there is no folder {place}"
            raise CannotStartError(f"--lora-adapters: {adapter.id}: {why}")
        found.append(adapter.at((file or place).absolute()))  # files of the hub's cache are links to others
    return found


def check_tokenizer(folder: Path) -> None:
    """Raises CannotStartError when the model's folder has no tokenizer."""
    from tgi_server.model_files.tokenizer_files import has_tokenizer  # imports huggingface_hub

    if not has_tokenizer(folder):
        raise CannotStartError(
            f"{folder} has neither a tokenizer.json nor a tokenizer of an older kind; add the tokenizer's files"
        )


def _check_local(model_id: str) -> None:
    """Raises CannotStartError for a path that is neither a folder in the format of transformers nor a GGUF file."""
    folder = Path(model_id).expanduser()
    if not (folder.exists() or folder.is_absolute() or model_id.startswith(".")):
        return  # an id of the hub
    if folder.suffix == SUFFIX:
        if not folder.is_file():
            raise CannotStartError(f"there is no file {folder}")
        return
    if not folder.is_dir():
        raise CannotStartError(f"there is no model folder {folder}")
    described = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    if not described and not any(folder.glob(f"**/*{SUFFIX}")):
        raise CannotStartError(f"{folder} has no config.json; is it a model folder in transformers format?")


def _check_cache(environment: Mapping[str, str]) -> None:
    """Raises CannotStartError for a user without a home if no variable names a folder for downloads."""
    if not _CACHES & environment.keys() and os.path.expanduser("~") == "~":
        raise CannotStartError("this user has no home, which downloads need; set HF_HOME to a folder for them")


async def _download(command: Command) -> Path:
    """Runs `text-generation-server download-weights`, which shows its progress on the terminal."""
    environment = {**os.environ, **command.environment}
    _check_cache(environment)
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
        env=environment,
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
