"""Runs `transformers` models on batches that change at every step. Knows neither gRPC nor HTTP."""

from tgi_server.engine.config import EngineConfig
from tgi_server.engine.engine import Engine, LoadedModel, Step
from tgi_server.engine.errors import EngineError
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.step import Generation, StepResult

__all__ = [
    "CacheCapacity",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Generation",
    "LoadedModel",
    "RunningSequence",
    "Step",
    "StepResult",
]
