"""Fills a model of `transformers` with tensors, and knows the names that it gives those of a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights

from tgi_server.engine.memory import HOST

T = TypeVar("T")


class _RangesOnHost(TorchFunctionMode):
    """Makes ranges on the CPU, from which models compute buffers such as the frequencies of rotary positions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": HOST} if func is torch.arange else {}))


def _made(make: Callable[[], T]) -> T:
    """Makes a model without random numbers and, where it can, without ranges on the device "meta".

    For both torch would import sympy, which takes more than a second.
    """
    with no_init_weights():
        try:
            with _RangesOnHost():
                return make()
        except RuntimeError:  # a model that computes with a range and with something on the device
            return make()


def empty_model(factory: Any, config: PretrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Returns a model on no device. factory: a class of `transformers` that has `from_config`."""
    with torch.device("meta"):
        model: PreTrainedModel = _made(lambda: factory.from_config(config, trust_remote_code=trust_remote_code))
    model.tie_weights(recompute_mapping=False)
    return model


def fill(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    arrange: Callable[[PreTrainedModel], None],
    tensors: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns a model with the tensors, and what `transformers` reports of loading them.

    arrange: changes the model before it has weights. tensors: by their names in the files; `[...]` reads one.
    """

    class Skeleton(model_class):
        """`from_pretrained` calls its class to make a model, and gets one of `model_class` that is arranged."""

        def __new__(cls, config: PretrainedConfig) -> Any:
            model = _made(lambda: model_class(config))
            arrange(model)
            return model

    Skeleton.__name__, Skeleton.__module__ = model_class.__name__, model_class.__module__
    model, report = Skeleton.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=dtype,
        device_map=_placement(device),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report
    )
    return model, report


def _placement(device: torch.device) -> dict[str, torch.device] | None:
    """Returns the `device_map` with which `transformers` puts each weight on the device as soon as it is read.

    On a CPU weights may stay where they are: in the pages of their files.
    """
    return None if device == HOST else {"": device}


def by_model_names(changes: Iterable[Any], tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors by the names in the files, and by those that `transformers` gives them in the model.

    changes: of `get_model_conversion_mapping(model)`. Tensors that it converts as it loads them have no such name.
    """
    names = {file_name: name_in_model(changes, file_name) for file_name in tensors}
    return {name: tensors[file_name] for file_name, name in names.items() if name is not None} | dict(tensors)


def name_in_model(changes: Iterable[Any], file_name: str) -> str | None:
    """Returns the name that `transformers` gives a tensor of a checkpoint; None for one that it converts."""
    name, converted = file_name, False
    for change in changes:
        name, pattern = change.rename_source_key(name)
        converted |= isinstance(change, WeightConverter) and pattern is not None
    return None if converted else name
