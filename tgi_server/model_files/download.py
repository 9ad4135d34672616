"""Finds a model's folder: a local one, or one in the Hugging Face hub's cache, downloaded if it is not there.

The hub's client itself reads the variables HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT, HF_HUB_CACHE, and those of proxies.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from json import JSONDecodeError
from pathlib import Path

from httpx2 import TransportError
from huggingface_hub import constants, model_info, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)

from tgi_server.gguf.paths import SUFFIX
from tgi_server.model_files.converted_models import convert, converted_copy
from tgi_server.model_files.copies import CODE, MEDUSA_FILE, METADATA, TEMPLATES, storage_hint
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.gguf_models import GgufChoice, described, gguf_of_folder, is_gguf_adapter, split_kind
from tgi_server.model_files.merged_models import base_of, is_adapter, merge, merged_copy
from tgi_server.model_files.tokenizer_files import PATTERNS, TOKENIZERS, has_tokenizer, with_tokenizer

logger = logging.getLogger(__name__)

# Files with the same weights in another format, and files of the training.
NOT_THE_MODEL = ["consolidated*", "training_args*", "optimizer*", "scheduler*", "rng_state*", "openvino*"]


def find_model(
    model_id: str,
    revision: str | None,
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    tokenizer_name: str | None = None,
) -> Path:
    """Returns the model's folder, without using the network. Raises ModelUnavailable if it is not on this machine.

    The folder of an adapter stands for its base model with the adapter merged. For a GGUF file it is a folder that
    describes it. gguf_file: name of the GGUF file, if there are several. tokenizer_name: folder or id of the hub whose
    tokenizer replaces the model's; the returned folder has links to both.
    """
    tokenizer = _tokenizer_folder(tokenizer_name, local_files_only=True)
    gguf = _gguf_folder(model_id, revision, gguf_file, tokenizer, local_files_only=True)
    if gguf is not None:
        return gguf
    folder = _find_folder(model_id, revision, trust_remote_code=trust_remote_code)
    return folder if tokenizer is None else with_tokenizer(folder, tokenizer)


def _find_folder(model_id: str, revision: str | None, *, trust_remote_code: bool) -> Path:
    folder = _local_folder(model_id)
    if folder is None:
        folder = _snapshot(
            model_id, revision, ".safetensors", trust_remote_code=trust_remote_code, local_files_only=True
        )
    if is_adapter(folder):
        base_id, base_revision = base_of(folder)
        merged = merged_copy(folder, _base(find_model, base_id, base_revision, trust_remote_code=trust_remote_code))
        if merged is None:
            raise ModelUnavailable(
                f"{model_id} is an adapter that is not merged into {base_id} yet; run `text-generation-server "
                f"download-weights --merge-lora {model_id}` first"
            )
        return merged
    if _has_weights(folder, ".safetensors"):
        return folder
    file = gguf_of_folder(folder, GgufChoice())
    return described(file) if file else converted_copy(folder) or folder


def find_models(
    model_id: str,
    revision: str | None,
    speculative_model: str | None,
    *,
    trust_remote_code: bool,
    gguf_file: str | None = None,
    tokenizer_name: str | None = None,
) -> tuple[Path, Path | None]:
    """Returns the folder of the model, and that of its draft model or heads, without using the network.

    Where `model_id` names Medusa heads, these draft, and the model is the one that they were made for. Raises
    ModelUnavailable.
    """
    find = partial(find_model, trust_remote_code=trust_remote_code, tokenizer_name=tokenizer_name)
    folder = find(model_id, revision, gguf_file=gguf_file)
    base = _base_of_heads(folder)
    if base is None:
        draft = speculative_model
        return folder, find_model(draft, None, trust_remote_code=trust_remote_code) if draft else None
    if speculative_model is not None:
        raise ModelUnavailable(f"{model_id} has Medusa heads, which draft; leave out --speculative-model")
    return find(base, None), folder


def download_model(
    model_id: str,
    revision: str | None,
    *,
    extension: str,
    auto_convert: bool,
    trust_remote_code: bool,
    merge_lora: bool = False,
    gguf_file: str | None = None,
    tokenizer_name: str | None = None,
) -> Path:
    """Returns the model's folder, complete; `.bin` weights are converted if there are no safetensors files.

    For a GGUF file it is a folder that describes it; for an adapter in a GGUF file the file itself.

    Files that are there already are not fetched again. Of an adapter the folder is its own, or with `merge_lora` that
    of its base model with the adapter merged. Of Medusa heads the model that they were made for is fetched as well, and
    its folder returned. Raises ModelUnavailable.
    """
    tokenizer = _tokenizer_folder(tokenizer_name)
    gguf = _gguf_folder(model_id, revision, gguf_file, tokenizer)
    if gguf is not None:
        return gguf
    fetch = partial(
        _download,
        extension=extension,
        auto_convert=auto_convert,
        trust_remote_code=trust_remote_code,
        merge_lora=merge_lora,
    )
    folder = fetch(model_id, revision)
    base = _base_of_heads(folder)
    folder = folder if base is None else fetch(base, None)
    return folder if tokenizer is None else with_tokenizer(folder, tokenizer)


def _tokenizer_folder(name: str | None, *, local_files_only: bool = False) -> Path | None:
    """Returns the folder of a tokenizer; None if none is named. Raises ModelUnavailable if it has none."""
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith("."):
            raise ModelUnavailable(f"--tokenizer-name: there is no folder {folder}")
        try:
            folder = Path(snapshot_download(name, allow_patterns=list(PATTERNS), local_files_only=local_files_only))
        except (HTTPError, OSError, XetDownloadError, ValueError, LookupError, TypeError) as error:
            raise ModelUnavailable(f"--tokenizer-name: {_explain(error, name)}") from error
    if not has_tokenizer(folder):
        raise ModelUnavailable(f"--tokenizer-name: {name} has none of {', '.join(TOKENIZERS)}")
    return folder


def _base_of_heads(folder: Path) -> str | None:
    """Returns the name of the model that the Medusa heads in a folder were made for; None if there are no heads."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None  # what is wrong is reported when it is loaded
    if not isinstance(config, dict) or "medusa_num_heads" not in config:
        return None
    base = config.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelUnavailable(f"{folder} has Medusa heads; its config.json must name their base_model_name_or_path")
    return base


def _download(
    model_id: str,
    revision: str | None,
    *,
    extension: str,
    auto_convert: bool,
    trust_remote_code: bool,
    merge_lora: bool,
) -> Path:
    folder = _local_folder(model_id)
    if folder is None:
        folder = _snapshot(model_id, revision, extension, trust_remote_code=trust_remote_code)
        if auto_convert and not _has_weights(folder, ".safetensors"):
            if _has_gguf(model_id, revision):
                file = _fetched_gguf(model_id, revision, GgufChoice(), local_files_only=False)
                return file if not merge_lora and is_gguf_adapter(file) else described(file)
            pickled = ".bin" if _base_of_heads(folder) is None else ".pt"
            logger.info("%s has no safetensors files; fetching its %s files", model_id, pickled)
            folder = _snapshot(model_id, revision, pickled, trust_remote_code=trust_remote_code)
    if is_adapter(folder):
        if not any(folder.glob("adapter_model.*")):
            raise ModelUnavailable(f"{model_id} has no adapter_model.safetensors and no adapter_model.bin")
        if not merge_lora:
            return folder
        fetch = partial(download_model, extension=extension, auto_convert=auto_convert)
        base = _base(fetch, *base_of(folder), trust_remote_code=trust_remote_code)
        return merge(folder, base, trust_remote_code=trust_remote_code)
    if auto_convert and not _has_weights(folder, ".safetensors") and _has_pickled_weights(folder):
        converted = convert(folder)
        folder = converted if _has_weights(converted, extension) else folder
    if not _has_weights(folder, extension):
        raise ModelUnavailable(f"{model_id} has no *{extension} files; name another model, or another --extension")
    return folder


def _base(find: Callable[..., Path], model_id: str, revision: str | None, *, trust_remote_code: bool) -> Path:
    """Returns the folder of an adapter's base model. Raises ModelUnavailable."""
    path = Path(model_id).expanduser()
    if path.is_dir() and is_adapter(path):
        raise ModelUnavailable(f"the base model {model_id} of the adapter is an adapter itself; merge that one first")
    return find(model_id, revision, trust_remote_code=trust_remote_code)


def _gguf_folder(
    model_id: str, revision: str | None, name: str | None, tokenizer: Path | None, *, local_files_only: bool = False
) -> Path | None:
    """Returns the folder that describes the model's GGUF file; None for a model of another kind, or if none is named.

    name: the file's name, if it is given. tokenizer: the folder of another tokenizer. Raises ModelUnavailable.
    """
    path = Path(model_id).expanduser()
    if path.is_dir():
        file = gguf_of_folder(path, GgufChoice(name))
        return None if file is None else described(file, tokenizer)
    if path.suffix == SUFFIX:
        return described(path, tokenizer)
    repository, kind = split_kind(model_id)
    choice = GgufChoice(name, kind)
    if path.exists() or path.is_absolute() or model_id.startswith(".") or repository.count("/") != 1:
        return None
    if not choice and model_id == repository:
        return None
    return described(_fetched_gguf(repository, revision, choice, local_files_only=local_files_only), tokenizer)


def _fetched_gguf(repository: str, revision: str | None, choice: GgufChoice, *, local_files_only: bool) -> Path:
    """Returns the chosen GGUF file of a repository of the hub, with its other parts. Raises ModelUnavailable."""
    local_files_only = local_files_only or constants.HF_HUB_OFFLINE
    fetch = partial(snapshot_download, repository, revision=revision, local_files_only=local_files_only)
    named = f"{repository} at revision {revision}" if revision else repository
    try:
        if local_files_only:
            folder = Path(fetch(allow_patterns=choice.patterns))
            file = gguf_of_folder(folder, choice)
        else:
            name = choice.of(_hub_files(repository, revision), named)
            wanted = [*(GgufChoice(name).patterns if name else ()), *METADATA]
            folder = Path(fetch(allow_patterns=wanted, ignore_patterns=[f"*/{pattern}" for pattern in METADATA]))
            file = None if name is None else folder / name
    except TransportError as error:
        try:
            file = _fetched_gguf(repository, revision, choice, local_files_only=True)
        except ModelUnavailable:
            raise ModelUnavailable(_unreachable(named, error)) from error
        logger.warning("the hub cannot be reached (%s); using what an earlier start fetched", _first_line(error))
    except (HTTPError, OSError, XetDownloadError, ValueError, LookupError, TypeError) as error:
        raise ModelUnavailable(_explain(error, named)) from error
    if file is None:
        raise ModelUnavailable(f"{named} has no GGUF files")
    return file


def _hub_files(repository: str, revision: str | None) -> list[str]:
    """Returns the names of a repository's files. Raises what the hub's client raises, after one try.

    `list_repo_files` would try for half a minute where there is no network.
    """
    info = model_info(repository, revision=revision or "main", timeout=constants.HF_HUB_ETAG_TIMEOUT)
    return [file.rfilename for file in info.siblings or ()]


def _has_gguf(repository: str, revision: str | None) -> bool:
    """Returns True for a repository of the hub with GGUF files. False where that is not known."""
    try:
        return any(name.endswith(SUFFIX) for name in _hub_files(repository, revision))
    except (HTTPError, OSError, ValueError, LookupError, TypeError):
        return False  # what is wrong is reported when other files are fetched


def _local_folder(model_id: str) -> Path | None:
    """Returns the folder that `model_id` names; None if it is an id of the hub. Raises ModelUnavailable otherwise."""
    path = Path(model_id).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter(path):
            raise ModelUnavailable(f"{path} has no config.json; is it a model folder in transformers format?")
        return path
    if path.exists():
        raise ModelUnavailable(f"{path} is a file; give the folder that holds the model")
    if path.is_absolute() or model_id.startswith(".") or model_id.count("/") > 1:
        raise ModelUnavailable(f"there is no model folder {path}")
    return None


def _has_weights(folder: Path, extension: str) -> bool:
    return any(folder.glob(f"*{extension}"))


def _has_pickled_weights(folder: Path) -> bool:
    return _has_weights(folder, ".bin") or (folder / MEDUSA_FILE).is_file()


def _snapshot(
    model_id: str, revision: str | None, extension: str, *, trust_remote_code: bool, local_files_only: bool = False
) -> Path:
    """Returns the folder of one commit in the hub's cache, complete. Raises ModelUnavailable."""
    wanted = [*METADATA, *(CODE if trust_remote_code else ()), f"*{extension}"]
    # Subfolders hold the same weights in other formats, but for that of further chat templates, and those of
    # sentence-transformers' modules, such as 1_Pooling.
    in_subfolders = [f"[!0-9]*/{pattern}" for pattern in wanted if pattern != TEMPLATES]
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=[*in_subfolders, *NOT_THE_MODEL],
            local_files_only=local_files_only,
        )
    except (HTTPError, OSError, XetDownloadError, ValueError, LookupError, TypeError) as error:
        named = f"{model_id} at revision {revision}" if revision else model_id
        raise ModelUnavailable(_explain(error, named)) from error
    return Path(folder)


def _explain(error: Exception, named: str) -> str:
    match error:
        case HFValidationError():
            return f"{named} is neither a local folder nor an id of the hub; give a folder, or OWNER/NAME"
        case GatedRepoError():
            return f"{named} is gated: request access on its page on the hub, then set HF_TOKEN"
        case RevisionNotFoundError():
            return f"the hub has no {named}; see the model's page on the hub for its revisions"
        case RepositoryNotFoundError():
            return f"the hub has no model {named}, and there is no such folder here; for a private model set HF_TOKEN"
        case LocalEntryNotFoundError(__cause__=OfflineModeIsEnabled()):
            return f"{named} is not complete on this machine; unset HF_HUB_OFFLINE to have it fetched"
        case IncompleteSnapshotError() | LocalEntryNotFoundError(__cause__=None):
            offline = "unset HF_HUB_OFFLINE to have it fetched"
            advice = offline if constants.HF_HUB_OFFLINE else "run `text-generation-server download-weights` first"
            return f"{named} is not complete on this machine; {advice}"
        case LocalEntryNotFoundError():
            return _unreachable(named, error.__cause__)
        case JSONDecodeError() | LookupError() | TypeError():  # of the client, which reads something else
            return (
                f"{named} could not be fetched: {constants.ENDPOINT} does not answer like the hub; check "
                "HF_ENDPOINT, and that no proxy answers in its place"
            )
    return f"{named} could not be fetched: {_first_line(error)}{storage_hint(error, constants.HF_HUB_CACHE)}"


def _unreachable(named: str, error: BaseException | None) -> str:
    return f"{named} is not on this machine, and the hub cannot be reached: {_first_line(error)}"


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
