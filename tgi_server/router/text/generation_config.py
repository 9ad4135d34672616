"""A model's own defaults for sampling, which its `generation_config.json` has."""

import logging
from math import isfinite
from pathlib import Path

from tgi_server.router.text.tokenizer_config import read_json

logger = logging.getLogger(__name__)

# The parameters that are taken from it; lengths and tokens are the server's affair.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(model: Path) -> dict[str, float]:
    """Returns the defaults that the model's folder names, and logs them. Raises StartupError for a broken file."""
    file = model / "generation_config.json"
    config = read_json(file)
    found = {name: config.get(name) for name in SAMPLING_DEFAULTS}
    defaults = {name: value for name, value in found.items() if isinstance(value, int | float) and isfinite(value)}
    if defaults:
        named = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("defaults of OpenAI's routes, by %s: %s", file.name, named)
    return defaults
