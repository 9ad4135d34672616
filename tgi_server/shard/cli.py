"""The command line `text-generation-server serve | download-weights | quantize`."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.logging import configure_logging
from shared.openmp import leave_threads_unbound, let_idle_threads_sleep
from shared.settings import fail, package_version, read_settings
from tgi_server.contract import Task
from tgi_server.loading import IMPORTING, percent_of, remove_progress, write_progress
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.ready_models import ready_model
from tgi_server.shard.settings import CommandSettings, DownloadSettings, QuantizeSettings, ShardSettings
from tgi_server.shard.sockets import shard_socket

logger = logging.getLogger(__name__)

PROGRAM = "text-generation-server"
FAILED = 1
INTERRUPTED = 130
_COMMANDS_HELP = """Commands:
  serve             Serves one shard of a model on a Unix socket, for the router; started by text-generation-launcher.
  download-weights  Fetches a model from the hub and converts its .bin weights to safetensors.
  quantize          Quantizes a model to 4 or 8 bits with GPTQ."""


def main() -> None:
    """Runs the command. Exit codes: 0 done, 1 the model cannot be fetched or served, 2 a wrong command line."""
    commands: dict[str, Callable[[Sequence[str]], None]] = {
        "serve": serve,
        "download-weights": download_weights,
        "quantize": quantize,
    }
    if "HF_API_TOKEN" in os.environ:  # as TGI's users also call it
        os.environ.setdefault("HF_TOKEN", os.environ["HF_API_TOKEN"])
    usage = (
        f"usage: {PROGRAM} {{{','.join(commands)}}} MODEL_ID ...; `{PROGRAM} COMMAND --help` lists a command's flags"
    )
    match sys.argv[1:]:
        case ["-h" | "--help", *_]:
            print(usage, _COMMANDS_HELP, sep="\n\n")
        case ["-V" | "--version", *_]:
            print(f"{PROGRAM} {package_version()}")
        case [name, *arguments] if name in commands:
            commands[name](arguments)
        case [name, *_]:
            fail(PROGRAM, f"there is no command {name!r}", usage)
        case _:
            fail(PROGRAM, usage)


def serve(arguments: Sequence[str]) -> None:
    program = f"{PROGRAM} serve"
    settings = read_settings(ShardSettings, program, arguments)
    service = settings.process_name
    _configure_logging(settings, service)
    leave_threads_unbound()
    let_idle_threads_sleep()

    socket = shard_socket(settings.uds_path, settings.rank)
    logger.info("loading: %s", IMPORTING)
    write_progress(socket, 0, IMPORTING)
    try:
        generates, drafts, folders = _folders(settings)

        from tgi_server.shard.lean_imports import lean_imports

        gc.disable()  # a tenth of the time that imports take, whose objects all stay
        with lean_imports():
            write_progress(socket, percent_of(IMPORTING, 0.5), IMPORTING)

            from tgi_server.shard import server  # imports torch, which takes seconds

            gc.freeze()
            gc.enable()
            loaded = server.load(settings, generates, drafts, folders)
        server.serve(settings, generates, folders, loaded)
    except ModelUnavailable as error:
        fail(service, str(error), status=FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        remove_progress(socket)


def _folders(settings: ShardSettings) -> tuple[Path | None, Path | None, dict[Task, Path]]:
    """Returns the folders of the model that generates, of what drafts for it, and of encoders, by task.

    None: there is no such model. Raises ModelUnavailable.
    """
    if settings.generates and not settings.encoders and settings.speculative_model is None:
        ready = ready_model(settings.model_id, settings.gguf_file, settings.tokenizer_name)
        if ready is not None:
            return ready, None, {}

    from tgi_server.model_files.download import find_model, find_models  # imports the hub's client

    trust = settings.trust_remote_code
    own = {"gguf_file": settings.gguf_file, "tokenizer_name": settings.tokenizer_name}
    encoders: dict[Task, Path] = {
        task: find_model(model_id, settings.revision, trust_remote_code=trust, **own)
        if model_id == settings.model_id
        else find_model(model_id, None, trust_remote_code=trust)
        for task, model_id in settings.encoders.items()
    }
    if not settings.generates:
        return None, None, encoders
    folder, drafts = find_models(
        settings.model_id, settings.revision, settings.speculative_model, trust_remote_code=trust, **own
    )
    return folder, drafts, encoders


def download_weights(arguments: Sequence[str]) -> None:
    """Fetches a model. Prints its folder on standard output; logs and progress bars go to standard error."""
    program = f"{PROGRAM} download-weights"
    settings = read_settings(DownloadSettings, program, arguments)
    _configure_logging(settings, "download")

    from huggingface_hub.utils import disable_progress_bars

    from tgi_server.model_files.download import download_model

    if settings.json_output:
        disable_progress_bars()
    try:
        folder = download_model(
            settings.model_id,
            settings.revision,
            extension=settings.extension,
            auto_convert=settings.auto_convert,
            trust_remote_code=settings.trust_remote_code,
            merge_lora=settings.merge_lora,
            gguf_file=settings.gguf_file,
            tokenizer_name=settings.tokenizer_name,
        )
    except ModelUnavailable as error:
        fail(program, str(error), status=FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    print(folder)


def quantize(arguments: Sequence[str]) -> None:
    """Standard output has one line, the folder that was written."""
    program = f"{PROGRAM} quantize"
    settings = read_settings(QuantizeSettings, program, arguments)
    _configure_logging(settings, "quantize")
    let_idle_threads_sleep()

    from tgi_server.model_files.download import find_model

    try:
        folder = find_model(
            settings.model_id,
            settings.revision,
            trust_remote_code=settings.trust_remote_code,
            gguf_file=settings.gguf_file,
            tokenizer_name=settings.tokenizer_name,
        )

        # imports torch and transformers, which takes seconds
        from tgi_server.model_files.quantize import GptqSettings, quantize_model

        quantize_model(
            folder,
            settings.output_dir,
            GptqSettings(settings.bits, settings.groupsize, settings.percdamp, settings.act_order),
            calibration=settings.calibration,
            samples=settings.samples,
            length=settings.length,
            trust_remote_code=settings.trust_remote_code,
        )
    except ModelUnavailable as error:
        fail(program, str(error), status=FAILED)
    except KeyboardInterrupt:
        fail(program, "interrupted; the same command resumes where it stopped", status=INTERRUPTED)
    print(settings.output_dir)


def _configure_logging(settings: CommandSettings, service: str) -> None:
    configure_logging(service, level=settings.logger_level, json_output=settings.json_output)


if __name__ == "__main__":
    main()
