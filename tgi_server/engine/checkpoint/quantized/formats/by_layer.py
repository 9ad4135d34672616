"""Settings of layers that differ from those of the checkpoint: GPTQModel's `dynamic`, AutoRound's `extra_config`.

Both go by regular expressions or names of layers. Which layers are quantised, and in how many bits and groups, is read
from the shapes of their tensors instead; the settings are checked for what no shape tells.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from tgi_server.engine.errors import InvalidWeights, UnsupportedModel

# Keys of `dynamic` that begin so name layers that are not quantised.
_LEFT_OUT = "-:"
# Of AutoRound: a layer of this many bits or more is not quantised.
_WHOLE_BITS = 16
# Settings that change what the tensors of a layer mean, with the values that change nothing.
_FIXED: dict[str, tuple[Any, ...]] = {
    "method": ("gptq",),
    "quant_method": ("gptq",),
    "format": ("gptq",),
    "checkpoint_format": ("gptq",),
    "pack_dtype": ("int32",),
    "adapter": (),
    "data_type": ("int",),
    "super_bits": (),
    "super_group_size": (),
}


def layer_settings(settings: Mapping[str, Any], bits: Container[int]) -> list[tuple[int | None, int | None]]:
    """Returns the bits and the group sizes that settings of single layers name; None: the checkpoint's.

    bits: those that are read. Raises UnsupportedModel, which names the setting.
    """
    found = []
    for name, values in _entries(settings):
        count = values.get("bits")
        if count is not None and count not in bits:
            raise UnsupportedModel(f"config.json: {name}.bits is {count!r:.40}, which is not read in this format")
        for setting, plain in _FIXED.items():
            value = values.get(setting)
            usual = (*plain, settings.get(setting)) if setting in ("format", "checkpoint_format") else plain
            if value is not None and value not in usual:
                raise UnsupportedModel(f"config.json: {name}.{setting} is {value!r:.80}, which is not supported")
        if (activations := values.get("act_bits")) is not None and activations < _WHOLE_BITS:
            raise UnsupportedModel(
                f"config.json: {name}.act_bits is {activations!r:.40}; inputs are not quantised here"
            )
        size = values.get("group_size")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise UnsupportedModel(f"config.json: {name}.group_size is {size!r:.40}; a whole number is needed")
        found.append((count, size))
    return found


def group_size_of(name: str, inputs: int, groups: int, known: Sequence[int | None]) -> int:
    """Returns the inputs that share a scale in a layer.

    name: of the tensor with a row for each group. known: sizes that the settings name; None: one group. Raises
    InvalidWeights.
    """
    sizes = [size or inputs for size in known]
    if groups > 0 and inputs % groups == 0:
        sizes.append(inputs // groups)
    size = next((size for size in sizes if -(-inputs // size) == groups), None)
    if size is None:
        raise InvalidWeights(f"tensor {name} has {groups} groups, which do not fit {inputs} inputs")
    return size


def _entries(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the name of each setting of layers that are quantised, and its values."""
    for setting in ("dynamic", "extra_config"):
        given = settings.get(setting) or {}
        if not isinstance(given, Mapping):
            raise UnsupportedModel(f"config.json: quantization_config.{setting} is {given!r:.80}; an object is needed")
        for key, values in given.items():
            name = f"quantization_config.{setting}[{key!r:.100}]"
            if setting == "dynamic" and key.startswith(_LEFT_OUT):
                continue
            if not isinstance(values, Mapping):
                raise UnsupportedModel(f"config.json: {name} is {values!r:.80}; an object is needed")
            bits = values.get("bits")
            if bits is not None and (not isinstance(bits, int) or isinstance(bits, bool)):
                raise UnsupportedModel(f"config.json: {name}.bits is {bits!r:.40}; a whole number is needed")
            if setting == "dynamic" or bits is None or bits < _WHOLE_BITS:
                yield name, values
