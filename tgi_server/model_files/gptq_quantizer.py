"""Quantizes a model's folder by GPTQ: one decoder layer in memory at a time, each written as soon as it is done."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tgi_server.engine.checkpoint.fill import empty_model, fill
from tgi_server.engine.checkpoint.quantized.formats import gptq as gptq_format
from tgi_server.engine.checkpoint.reader import open_checkpoint
from tgi_server.engine.checkpoint.weight_files import check_files, fingerprint, write_index
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.memory import HOST
from tgi_server.model_files.gptq_rounding import GptqSettings, Hessian, round_weight

_SETTINGS = "quantize_config.json"
# The file that describes an unfinished run, in the run's folder.
_RUN = "run.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


Tensors = dict[str, Tensor]


@torch.inference_mode()
def quantize_folder(
    source: Path, target: Path, samples: Sequence[Tensor], settings: GptqSettings, *, trust_remote_code: bool = False
) -> None:
    """Writes the model in a folder to another one, with the linear layers of its decoder layers in GPTQ.

    samples: calibration texts, [tokens] int64 each. Layers that an interrupted run with the same settings has written
    are reused. Raises UnsupportedModel for a model that cannot be quantized, and when the target is not empty.
    """
    check_files(source)
    transformers_logging.disable_progress_bar()  # of every single layer's weights
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=True)
    model = _Layers(source, config, trust_remote_code)
    partial = target.with_name(target.name + ".partial")
    _prepare(target, partial, _run(source, samples, settings))
    count = len(model.paths)
    files = [partial / f"model-{index + 1:05}-of-{count + 1:05}.safetensors" for index in range(count + 1)]
    hidden, arguments = model.inputs(samples)
    for path, file, further in zip(tqdm(model.paths, desc="quantizing", unit="layer"), files, arguments, strict=False):
        layer = model.load([path]).get_submodule(path)
        prefix = f"{model.name_in_files(path)}."
        if file.is_file():
            _dequantize(layer, file, prefix, settings)
        else:
            tensors = _quantized_layer(layer, hidden, further, settings)
            _write(file, {prefix + name: tensor for name, tensor in tensors.items()})
        hidden = [_output(layer(states, **known)) for states, known in zip(hidden, further, strict=True)]
    _write(files[-1], model.rest())
    _finish(source, partial, settings)
    if target.exists():
        target.rmdir()
    partial.rename(target)


class _Layers:
    """A model that is loaded a few decoder layers at a time. paths: the paths of all decoder layers."""

    def __init__(self, folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> None:
        self._folder = folder
        self._config = config
        empty = empty_model(AutoModelForCausalLM, config, trust_remote_code=trust_remote_code)
        self._class = type(empty)
        self._dtype = getattr(config, "dtype", None) or torch.float32
        lists = [(path, module) for path, module in empty.named_modules() if isinstance(module, nn.ModuleList)]
        depth = config.get_text_config(decoder=True).num_hidden_layers
        found = [path for path, module in lists if len(module) == depth]
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedModel(f"{folder} is quantized already; use the model from before")
        if len(found) != 1 or not any(type(module) is nn.Linear for module in empty.get_submodule(found[0]).modules()):
            raise UnsupportedModel(
                f"{config.model_type} models cannot be quantized: they have no decoder layers of linears"
            )
        self.paths = [f"{found[0]}.{index}" for index in range(depth)]

    def load(self, paths: Sequence[str]) -> PreTrainedModel:
        """Returns the model with these layers; the others pass their input on."""
        left_out = [path for path in self.paths if path not in paths]

        def leave_out(model: PreTrainedModel) -> None:
            for path in left_out:
                model.set_submodule(path, _LayerRecorder(model.get_submodule(path)))

        with open_checkpoint(self._folder) as tensors:
            wanted = {name: tensor for name, tensor in tensors.items() if not self._is_of(name, left_out)}
            model, report = fill(self._class, copy.deepcopy(self._config), leave_out, wanted, self._dtype, HOST)
        if wrong := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
            raise UnsupportedModel(f"{self._folder}: its tensors differ from the model's in name or shape: {wrong[0]}")
        return model.eval().requires_grad_(False)

    def name_in_files(self, path: str) -> str:
        """Returns the path of a layer in the checkpoint."""
        ending = f".{_ending(path)}."
        with open_checkpoint(self._folder) as tensors:
            name = next(f".{name}" for name in tensors if ending in f".{name}")
        return (name.partition(ending)[0] + ending).strip(".")

    def inputs(self, samples: Sequence[Tensor]) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
        """Returns the first layer's input for each sample, and by layer the other arguments of its calls."""
        model = self.load([])
        recorders = [model.get_submodule(path) for path in self.paths]
        for sample in samples:
            model(input_ids=sample.unsqueeze(0), use_cache=False)
        return recorders[0].inputs, [recorder.arguments for recorder in recorders]

    def rest(self) -> dict[str, Tensor]:
        """Returns the tensors outside of decoder layers."""
        with open_checkpoint(self._folder) as tensors:
            return {name: tensor[...] for name, tensor in tensors.items() if not self._is_of(name, self.paths)}

    def _is_of(self, name: str, paths: Sequence[str]) -> bool:
        return any(f".{_ending(path)}." in f".{name}" for path in paths)


def _ending(path: str) -> str:
    """Returns the last two names of a path, such as layers.3: checkpoints may leave out what stands before."""
    return ".".join(path.split(".")[-2:])


class _LayerRecorder(nn.Module):
    """Replaces a decoder layer, records the arguments of its calls, and passes its input on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):  # by which some models choose a layer's mask
            self.attention_type = layer.attention_type
        self.inputs: list[Tensor] = []
        self.arguments: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, *_: Any, **arguments: Any) -> Tensor:
        self.inputs.append(hidden_states)
        self.arguments.append(arguments)
        return hidden_states


def _quantized_layer(
    layer: nn.Module, hidden: Sequence[Tensor], arguments: Sequence[dict[str, Any]], settings: GptqSettings
) -> Tensors:
    """Returns the tensors of a layer whose linears are quantized, by names in it. Raises UnsupportedModel."""
    linears = {name: module for name, module in layer.named_modules() if type(module) is nn.Linear}
    hessians = {name: Hessian(module.in_features, module.weight.device) for name, module in linears.items()}
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, hessian=hessians[name]: hessian.add(inputs[0]))
        for name, module in linears.items()
    ]
    for states, further in zip(hidden, arguments, strict=True):
        layer(states, **further)
    for hook in hooks:
        hook.remove()
    tensors: Tensors = dict(layer.state_dict())
    for name, module in linears.items():
        hessian = hessians.pop(name).mean()
        if not hessian.isfinite().all():
            raise UnsupportedModel(f"the calibration text makes inputs of {name} that are infinite or no numbers")
        weight = round_weight(module.weight, hessian, settings)
        module.weight = nn.Parameter(weight.dense(module.weight.dtype), requires_grad=False)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in gptq_format.tensors(weight, settings.bits).items()}
    return tensors


def _dequantize(layer: nn.Module, file: Path, prefix: str, settings: GptqSettings) -> None:
    """Loads the weights that an earlier run has written for a layer. prefix: the prefix of their names."""
    read = gptq_format.GptqFormat(settings.bits, settings.group_size if settings.group_size > 0 else None, 1)
    with safe_open(file, framework="pt") as opened:
        files = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        for source in gptq_format.sources(files, read):
            module: Any = layer.get_submodule(source.name.removeprefix(prefix).removesuffix(".weight"))
            module.weight = nn.Parameter(source[...].to(module.weight.dtype), requires_grad=False)


def _output(result: Any) -> Tensor:
    """Returns the hidden states that a decoder layer returns, alone or as the first of several things."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _run(source: Path, samples: Sequence[Tensor], settings: GptqSettings) -> dict[str, Any]:
    """Returns the facts that must be equal for a run to continue an earlier one, by the words for a difference."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.numpy().tobytes())
    model = f"{source.resolve()} {fingerprint(source)}"
    return {
        "other settings": _description(settings),
        "another model": model,
        "another calibration text": digest.hexdigest(),
    }


def _prepare(target: Path, partial: Path, run: dict[str, Any]) -> None:
    """Creates the folder in which a run writes, or continues in that of an earlier run."""
    if target.exists() and any(target.iterdir()):
        raise UnsupportedModel(f"{target} is not empty; give a folder that does not exist yet")
    partial.mkdir(parents=True, exist_ok=True)
    file = partial / _RUN
    if file.is_file() and (earlier := json.loads(file.read_text())) != run:
        what = next(name for name in run if earlier.get(name) != run[name])
        raise UnsupportedModel(f"{partial} has layers of a run with {what}; remove it, or start that run again")
    file.write_text(json.dumps(run))


def _description(settings: GptqSettings) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": settings.bits,
        "group_size": settings.group_size,
        "damp_percent": settings.damping,
        "desc_act": settings.act_order,
        "sym": False,
        "checkpoint_format": "gptq",
    }


def _write(file: Path, tensors: Tensors) -> None:
    unfinished = file.with_suffix(".unfinished")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, file)


def _finish(source: Path, partial: Path, settings: GptqSettings) -> None:
    """Adds the other files of a model's folder: the index of the weights, config.json, tokenizer and the like."""
    write_index(partial)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copy(file, partial / file.name)
    for file in source.glob("*/*.jinja"):  # further chat templates have a folder of their own
        (partial / file.parent.name).mkdir(exist_ok=True)
        shutil.copy(file, partial / file.parent.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _description(settings)
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    (partial / _SETTINGS).write_text(json.dumps(_description(settings), indent=2))
    (partial / _RUN).unlink()
