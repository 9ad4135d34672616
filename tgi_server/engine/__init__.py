"""Runs `transformers` models on batches that change at every step. Knows neither gRPC nor HTTP."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tgi_server.engine.config import EngineConfig
    from tgi_server.engine.engine import Engine
    from tgi_server.engine.errors import EngineError
    from tgi_server.engine.load_parts import LoadedModel
    from tgi_server.engine.runners.base import CacheCapacity
    from tgi_server.engine.sequence import RunningSequence
    from tgi_server.engine.step import Generation, Step, StepResult

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

# Imported when they are first used: kernels can be compiled and checked where there is torch alone.
_MODULES = {
    "CacheCapacity": "runners.base",
    "EngineConfig": "config",
    "EngineError": "errors",
    "Generation": "step",
    "LoadedModel": "load_parts",
    "RunningSequence": "sequence",
    "Step": "step",
    "StepResult": "step",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'engine')}"), name)
