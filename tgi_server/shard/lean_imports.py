"""Imports `transformers` without the slow parts of torch that serving does not need."""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_DYNAMO = "torch._dynamo"
_MASKS = f"{_DYNAMO}._trace_wrapped_higher_order_op"


@contextmanager
def lean_imports(*, whole: bool = False) -> Iterator[None]:
    """Imports `transformers` without `torch._dynamo` and `torch.distributed.tensor`, and scans its models' files once.

    whole: True imports `torch.distributed.tensor` as well. Without it, `transformers` cannot run a model on several
    processes in this process.

    `transformers` needs the first only for decorators of `torch.compile`, and the second for its own tensor
    parallelism. Both can be imported later as usual. If a release of `transformers` cannot be imported in this way, it
    is imported as usual when it is first needed.
    """
    if "transformers" in sys.modules or _DYNAMO in sys.modules:
        yield
        return
    sys.modules.update({_DYNAMO: _dynamo(), _MASKS: _masks()})
    try:
        for name in ("utils.import_utils", "utils"):
            module: Any = importlib.import_module(f"transformers.{name}")
            if not whole:
                module.is_torch_distributed_available = _never
        _import_models()
        for name in ("modeling_utils", "masking_utils"):
            importlib.import_module(f"transformers.{name}")
    except (ImportError, AttributeError) as error:
        logger.debug("transformers is imported with all its dependencies: %s", error)
        _remove_stand_ins()
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
    try:
        yield
    finally:
        _remove_stand_ins()


def _remove_stand_ins() -> None:
    if isinstance(sys.modules.get(_DYNAMO), _StandIn):
        del sys.modules[_DYNAMO], sys.modules[_MASKS]


def _import_models() -> None:
    """Imports `transformers.models` without a second scan of its files.

    `transformers` scans more than a thousand files of models for exported names when it is imported, and again for this
    package. The second scan is replaced by the result of the first.
    """
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")
    look_through = import_utils.define_import_structure
    folder = Path(import_utils.__file__).parent.parent / "models"

    def known(module_path: str, prefix: str | None = None) -> Any:
        if Path(module_path) != folder / "__init__.py" or prefix is not None:
            return look_through(module_path, prefix)
        exported = look_through(folder, prefix="models")  # from its cache
        return {
            backends: {
                name.removeprefix("models."): names for name, names in modules.items() if name.startswith("models.")
            }
            for backends, modules in exported.items()
        }

    import_utils.define_import_structure = known
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = look_through


def _never() -> bool:
    return False


class _StandIn(ModuleType):
    """Replaces `torch._dynamo` until more than its decorators is needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _dynamo() -> ModuleType:
    module = _StandIn(_DYNAMO)
    for decorator in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(module, decorator, _undecorated)
    return module


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    return _undecorated if function is None else function


def _masks() -> ModuleType:
    """Returns a replacement for the module of a context manager that `transformers` uses for some kinds of masks."""

    def make(*arguments: Any) -> Any:
        _remove_stand_ins()
        return importlib.import_module(_MASKS).TransformGetItemToIndex(*arguments)

    module = ModuleType(_MASKS)
    module.TransformGetItemToIndex = make  # type: ignore[attr-defined]
    return module
