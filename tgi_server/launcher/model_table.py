"""The table of models of a server of several models: from `--models`, or a TOML file."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shared.control_groups import available_ram
from shared.gpus import has_gpu
from shared.settings import InvalidSettings, check_settings
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.settings import RequestSettings
from tgi_server.shard.settings import ModelSettings

_SUFFIX = ".toml"
# Flags of one model, which must be in the table.
_OF_ONE_MODEL = frozenset(
    {
        *("model_id", "revision", "gguf_file", "tokenizer_name", "tokenizer_config_path", "served_model_name"),
        *("lora_adapters", "speculative_model", "num_shard", "sharded", "master_port"),
    }
)
# Settings that an entry cannot have, since further models are entries of their own.
_BESIDE: Mapping[str, Any] = {"models": [], "models_memory": None, "embedding_model_id": None, "rerank_model_id": None}
_SETTINGS = {*RequestSettings.model_fields, *ModelSettings.model_fields, "num_shard"} - {
    *_BESIDE,
    "otlp_endpoint",
    "json_output",
}
_OWN: Mapping[str, type[Any]] = {"pinned": bool, "idle_seconds": float, "priority": int}
# Share of the available memory for all models, and share of that for their KV caches.
_MEMORY_SHARE, _KV_SHARE = 0.8, 0.3
_GIB = 1 << 30
# Memory of a model's processes, also while it sleeps: from 0.35 to 1.1 GiB.
_PROCESS_BYTES = 3 * _GIB // 4


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One of the models of a server.

    label: its name in the log. settings: the launcher's settings for this model. pinned: True if it never sleeps.
    idle_seconds: time without requests after which it sleeps; None: it sleeps only to free memory for others. priority:
    models with larger numbers are put to sleep first. weight_bytes: size of the loaded weights.
    """

    label: str
    settings: LauncherSettings
    pinned: bool = False
    idle_seconds: float | None = None
    priority: int = 0
    weight_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Returns the bytes of weights and KV cache."""
        return self.weight_bytes + (self.settings.cpu_memory or 0)

    @property
    def task(self) -> str | None:
        """Returns embed or rank for an encoder, None for a model that generates."""
        own = self.settings
        return None if own.generates else "embed" if own.model_id == own.embedding_model_id else "rank"


def read_models(settings: LauncherSettings) -> list[ModelEntry]:
    """Returns the models of `--models`, and those of `--embedding-model-id` and `--rerank-model-id`.

    Raises CannotStartError, which names the entry and the key.
    """
    if given := sorted(_OF_ONE_MODEL & settings.model_fields_set):
        flag = given[0].replace("_", "-")
        raise CannotStartError(
            f"--{flag} (or {given[0].upper()}) is a flag of one model, and --models names several: use a table "
            f"(FILE.toml) with the key `{flag}`"
            if given[0] != "model_id"
            else "--model-id (or MODEL_ID) and --models are both set; leave one of them out"
        )
    if settings.num_nodes > 1:
        raise CannotStartError("--models works on one machine only; leave it out with --num-nodes")
    tables = list(_tables(settings.models))
    further = (settings.embedding_model_id, settings.rerank_model_id)
    tables += [(f"the model {each}", {"id": each}) for each in further if each]
    entries = [_entry(settings, place, table) for place, table in tables]
    labels = [entry.label for entry in entries]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise CannotStartError(f"--models: two models are called {twice!r}; name them: --models a=MODEL,b=MODEL")
    return entries


def _tables(given: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the entries, each with its name in error messages."""
    if len(given) == 1 and given[0].endswith(_SUFFIX):
        yield from _tables_of(Path(given[0]).expanduser())
        return
    for text in given:
        name, equals, model_id = text.partition("=")
        if not (model_id if equals else name):
            raise CannotStartError(f"--models: {text!r} is not MODEL or NAME=MODEL")
        if text.endswith(_SUFFIX):
            raise CannotStartError(f"--models: {text} is a table of models; it must be the only argument")
        yield f"--models: {text}", {"id": model_id, "name": name} if equals else {"id": name}


def _tables_of(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CannotStartError(f"--models: {file} cannot be read as TOML: {reason}") from None
    models = content.pop("model", None)
    if content:
        raise CannotStartError(f"{file}: `{next(iter(content))}` is unknown; each model begins with the line [[model]]")
    if not isinstance(models, list) or not models or not all(isinstance(each, dict) for each in models):
        raise CannotStartError(f"{file} has no models; each begins with the line [[model]]")
    for number, table in enumerate(models, 1):
        yield f"{file}, model {number}", table


def _entry(base: LauncherSettings, place: str, table: Mapping[str, Any]) -> ModelEntry:
    values = {key.replace("-", "_"): value for key, value in table.items()}
    model_id, name = values.pop("id", None), values.pop("name", None)
    if not isinstance(model_id, str) or not model_id:
        raise CannotStartError(f"{place}: `id` is missing: a folder, a GGUF file, or an id of the hub")
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise CannotStartError(f"{place}: `name` is {name!r}, which is not a name")
    if name is not None and "served_model_name" in values:
        raise CannotStartError(f"{place}: `name` and `served-model-name` are both set; leave one of them out")
    own = {key: _own(place, key, values.pop(key)) for key in _OWN if key in values}
    for key in values:
        if key not in _SETTINGS:
            raise CannotStartError(f"{place}: {_unknown(key)}")
    names = {} if name is None else {"served_model_name": [name]}
    inherited = {each: getattr(base, each) for each in base.model_fields_set - _BESIDE.keys()}
    try:
        settings = check_settings(LauncherSettings, inherited | values | names | {"model_id": model_id})
    except InvalidSettings as error:
        raise CannotStartError(f"{place}: {error}") from None
    settings = settings.model_copy(update=_BESIDE)  # which variables may have set again
    return ModelEntry(next(iter(settings.served_model_name), _label(settings.model_id)), settings, **own)


def _own(place: str, key: str, value: Any) -> Any:
    try:
        found = TypeAdapter(_OWN[key]).validate_python(value, strict=not isinstance(value, int))
    except ValidationError:
        kind = {bool: "true or false", float: "a number of seconds", int: "a number"}[_OWN[key]]
        raise CannotStartError(f"{place}: `{key.replace('_', '-')}` is {value!r}; it must be {kind}") from None
    if key == "idle_seconds" and not found > 0:
        raise CannotStartError(f"{place}: `idle-seconds` is {value!r}; it must be more than 0")
    return found


def _unknown(key: str) -> str:
    shown = key.replace("_", "-")
    if key in LauncherSettings.model_fields:
        return f"`{shown}` is a setting of the whole server; give it as the flag --{shown}"
    near = get_close_matches(key, [*_SETTINGS, *_OWN, "id", "name"], 1, 0.8)
    hint = f"; did you mean `{near[0].replace('_', '-')}`?" if near else ""
    return f"`{shown}` is unknown{hint}"


def _label(model_id: str) -> str:
    path = Path(model_id).expanduser()
    return path.name if path.exists() else model_id


def within_memory(entries: Sequence[ModelEntry], limit: int | None) -> tuple[list[ModelEntry], int | None]:
    """Returns the entries with the sizes of their KV caches, and the limit in bytes for all models that are awake.

    limit: `--models-memory`. On GPUs the limit is None: the memory of each model is its `cuda-memory-fraction`.

    Raises CannotStartError if a model does not fit beside the pinned ones.
    """
    if has_gpu():
        if limit is not None:
            raise CannotStartError("--models-memory is for CPUs; on GPUs give each model a `cuda-memory-fraction`")
        return list(entries), None
    available = available_ram()
    left = max(available - len(entries) * _PROCESS_BYTES, available // 3)
    most = limit or int(left * _MEMORY_SHARE)
    generating = sum(entry.settings.generates for entry in entries)
    share = int(most * _KV_SHARE / max(generating, 1))
    sized = [
        entry
        if entry.settings.cpu_memory or not entry.settings.generates
        else replace(entry, settings=entry.settings.model_copy(update={"cpu_memory": share}))
        for entry in entries
    ]
    pinned = sum(entry.bytes for entry in sized if entry.pinned)
    for entry in sized:
        needed = entry.bytes + (0 if entry.pinned else pinned)
        if needed > most:
            beside = "" if entry.bytes == needed else f" beside {pinned / _GIB:.2f} GiB of pinned models"
            raise CannotStartError(
                f"{entry.label} needs {entry.bytes / _GIB:.2f} GiB for weights and KV cache{beside}, and the limit of "
                f"all models is {most / _GIB:.2f} GiB; raise --models-memory, lower the model's `cpu-memory`, or "
                "quantize it"
            )
    return sized, most
