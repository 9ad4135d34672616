"""Reads a model's own sampling defaults from its `generation_config.json`."""

import logging
from pathlib import Path

from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect, fault_of, rows
from tgi_server.router.text.tokenizer_config import read_object

logger = logging.getLogger(__name__)

# The parameters that are read; lengths and special tokens are the server's own.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Numbers from here on do not fit into the messages to the shards.
_TOO_LARGE = 2.0**128


def read_sampling_defaults(model: Path) -> dict[str, float]:
    """Returns the sampling defaults in the model's folder, and logs them. Raises StartupError for a broken file.

    Values that no request may have are left out, with a warning.
    """
    file = model / "generation_config.json"
    config = read_object(file)
    defaults: dict[str, float] = {}
    for name in SAMPLING_DEFAULTS:
        if (value := config.get(name)) is None:
            continue
        try:
            defaults[name] = _checked(name, value)
        except InvalidRequest as error:
            logger.warning("%s: %s; it is ignored", file, error)
    if defaults:
        named = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("defaults of OpenAI's routes, by %s: %s", file.name, named)
    return defaults


def _checked(name: str, value: object) -> float:
    """Returns the value in the form of a request's field. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
        raise InvalidRequest.at(name, f"must be a number, not {value!r}")
    if name == "top_k":
        if value != int(value):
            raise InvalidRequest.at("top_k", f"must be a whole number, not {value}")
        value = int(value)
    bounds = next(row.bounds for row in rows(Dialect.CHAT) if row.option == name)
    if fault := fault_of(bounds, value):
        raise InvalidRequest.at(name, f"is {value}; it must be {fault}")
    return value
