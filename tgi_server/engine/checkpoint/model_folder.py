"""A model's folder, whose config.json and generation_config.json are read once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tgi_server.engine.checkpoint.settings_check import check_padding, check_rotary_settings
from tgi_server.engine.errors import ModelNotFound, UnsupportedModel
from tgi_server.engine.models.families import family_of

CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder in the format of `transformers`.

    config, generation: the contents of config.json and generation_config.json; empty where there is no such file.
    model: the model's own configuration, or that of its text model where only that can be built.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    model: PretrainedConfig

    @classmethod
    def read(cls, path: Path, *, trust_remote_code: bool = False) -> Self:
        """Returns the folder at a path. Raises ModelNotFound or UnsupportedModel."""
        if not path.is_dir():
            raise ModelNotFound(f"no model folder at {path}; give a folder in transformers format, or a hub model id")
        if not (path / CONFIG).is_file():
            raise ModelNotFound(f"{path} has no {CONFIG}; is it a model folder in transformers format?")
        config, generation = (read_object(path / name) for name in (CONFIG, GENERATION))
        check_rotary_settings(path / CONFIG, config)
        try:
            found = _parsed(path, config, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever a setting of the wrong kind leads to, or code that came with the model
            cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
            raise UnsupportedModel(f"{path / CONFIG} cannot be used: {first_line(cause or error)}") from error
        text_config = found.get_text_config(decoder=True)
        check_padding(path / CONFIG, text_config)
        return cls(path, config, generation, text_config if family_of(found).text_alone else found)

    @classmethod
    def around(cls, model: PreTrainedModel, path: Path) -> Self:
        """Returns the folder at a path, of which a model has been loaded already. Raises UnsupportedModel."""
        return cls(path, read_object(path / CONFIG), read_object(path / GENERATION), model.config)


def _parsed(path: Path, config: dict[str, Any], *, trust_remote_code: bool) -> PretrainedConfig:
    """Returns the configuration of `transformers`, as `AutoConfig` does, which would read the file again."""
    kind = config.get("model_type")
    if kind == "mistral" and "layer_types" in config:
        kind = "ministral"
    if "auto_map" in config or kind not in CONFIG_MAPPING:  # code that came with the model, or an error that says more
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    return CONFIG_MAPPING[kind].from_dict({**config, "model_type": kind})


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object of a file, an empty one if there is no file.

    Raises UnsupportedModel for a file without a JSON object: `transformers` finds that late or never.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=_with_floats)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{file} is not a JSON object; download it again")
    return content


def _with_floats(content: dict[str, Any]) -> Any:
    """Returns the number that `transformers` writes as an object, such as infinity, which JSON does not have."""
    return float(content["__float__"]) if content.keys() == {"__float__"} else content


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
