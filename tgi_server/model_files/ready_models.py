"""Folders of models that are complete on this machine. Imports neither the hub's client nor what reads weights."""

from pathlib import Path

from tgi_server.gguf.paths import SUFFIX

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def ready_model(
    model_id: str, gguf_file: str | None = None, tokenizer_name: str | None = None, cache: Path | None = None
) -> Path | None:
    """Returns the folder from which a model is loaded, if a quick look finds it; None if `find_model` must look for it.

    That is a complete folder, or one that describes a GGUF file. gguf_file, tokenizer_name: as in `find_model`. cache:
    the hub's cache; None: that of this process.
    """
    if gguf_file or tokenizer_name:
        return None
    folder = complete_folder(model_id) or _described(Path(model_id).expanduser(), cache)
    if folder is None or b'"medusa_num_heads"' in (folder / "config.json").read_bytes():
        return None
    return folder


def complete_folder(model_id: str) -> Path | None:
    """Returns the folder if it has all files that a shard reads; None if something must be fetched or converted."""
    folder = Path(model_id).expanduser()
    weights = [file for file in folder.glob("*.safetensors") if file.name != ADAPTER_WEIGHTS]
    return folder if (folder / "config.json").is_file() and weights else None


def _described(file: Path, cache: Path | None) -> Path | None:
    if file.suffix != SUFFIX or not file.is_file():
        return None
    # These import huggingface_hub, which other models do not need here.
    from huggingface_hub import constants

    from tgi_server.model_files.gguf_models import known_description

    return known_description(file) if cache is None or cache == Path(constants.HF_HUB_CACHE) else None
