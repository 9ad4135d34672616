"""Runs `transformers` models on batches that change at every step. Knows neither gRPC nor HTTP."""

from tgi_server.engine.config import EngineConfig
from tgi_server.engine.engine import Engine, ModelInfo, Step
from tgi_server.engine.errors import EngineError
from tgi_server.engine.models.runner import Capacity
from tgi_server.engine.results import Generation, StepResult
from tgi_server.engine.sequence import Sequence

__all__ = [
    "Capacity",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Generation",
    "ModelInfo",
    "Sequence",
    "Step",
    "StepResult",
]
