"""The command `oatmill` (serves models, chats, checks a machine), and `LLM`, a model within a Python program."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shared.openmp import let_idle_threads_sleep

if TYPE_CHECKING:
    from oatmill.llm import LLM, InvalidInput, LLMError, Result

__all__ = ["LLM", "InvalidInput", "LLMError", "Result"]

# Before torch is imported, or it has no effect.
THREADS_SLEEP = let_idle_threads_sleep()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("oatmill.llm"), name)
