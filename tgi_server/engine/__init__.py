"""Runs `transformers` models on batches that change at every step. Knows neither gRPC nor HTTP."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Imported when they are first asked for: the process that tries grammars needs a part of this package, and no torch.
_MODULES = {
    "Capacity": "models.runner",
    "EngineConfig": "config",
    "EngineError": "errors",
    "Generation": "results",
    "Sequence": "sequence",
    "StepResult": "results",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'engine')}"), name)
