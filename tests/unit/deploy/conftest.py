"""The contents of docker-compose.yml."""

from pathlib import Path
from typing import Any

import pytest
import yaml

COMPOSE = Path(__file__).parents[3] / "docker-compose.yml"


@pytest.fixture(scope="session")
def services() -> dict[str, Any]:
    composed: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return composed
