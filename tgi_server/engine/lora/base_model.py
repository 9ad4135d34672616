"""The model that adapters change: its linear layers, and their weights as its checkpoint has them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.checkpoint.quantized import Quantization, find_quantization
from tgi_server.engine.checkpoint.safetensors_files import Checkpoint, QuantizedTensor, SlicedTensor, open_checkpoint
from tgi_server.engine.errors import InvalidAdapter

# Names that checkpoints have for modules which models have by other names now: of GPT-NeoX.
_OLD_NAMES = {"lm_head": ("embed_out",)}


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """A linear layer of the whole base model. transposed: its weight is [in_features, out_features]."""

    in_features: int
    out_features: int
    transposed: bool = False


class BaseWeights:
    """The weights and biases of a model's checkpoint, by the paths of layers in the model."""

    def __init__(self, open_files: Callable[[], Checkpoint], base: "BaseModel") -> None:
        """open_files: called when the first tensor is read; most adapters need none."""
        self._open_files = open_files
        self._base = base

    @cached_property
    def _tensors(self) -> Checkpoint:
        return self._open_files()

    def weight(self, path: str) -> Tensor:
        """Returns a layer's weight, [out_features, in_features], float32. Raises InvalidAdapter if there is none."""
        found = self._find(path, "weight")
        if found is None:
            raise InvalidAdapter(
                f"the adapter needs the weight of {path}, which the files of the base model in {self._base.folder} do "
                "not have under that name; merge the adapter with peft, and serve the merged model"
            )
        weight = found[...].float()
        outputs_first = isinstance(found, QuantizedTensor) and not found.stacked  # as is every quantised weight
        return weight.T if self._base.layers[path].transposed and not outputs_first else weight

    def bias(self, path: str) -> Tensor | None:
        """Returns a layer's bias, [out_features], float32; None for a layer without one."""
        bias = self.stored(path, "bias")
        return None if bias is None else bias.float()

    def stored(self, path: str, tensor: str = "weight") -> Tensor | None:
        """Returns a tensor of the module at a path as the checkpoint has it; None if there is none."""
        found = self._find(path, tensor)
        return None if found is None else found[...]

    def _find(self, path: str, tensor: str) -> SlicedTensor | QuantizedTensor | None:
        found = (self._tensors.get(f"{name}.{tensor}") for name in self._base.names(path))
        return next((each for each in found if each is not None), None)


@dataclass(frozen=True)
class BaseModel:
    """A base model as its adapters see it: whole, also where it is computed by several shards or in other layers.

    config: that of its text. layers: its linear layers, by their paths in the model of `transformers`. prefix: of the
    paths in the part without the head. tied: the paths of a head and of embeddings that share their weight, as far as
    there are such. may_untie: the model computes the same when they do not, and have equal weights.
    """

    folder: Path
    config: PretrainedConfig
    layers: Mapping[str, BaseLayer]
    prefix: str
    tied: Mapping[str, str]
    may_untie: bool
    quantization: Quantization | None

    @classmethod
    def of(cls, folder: Path, config: PretrainedConfig, *, trust_remote_code: bool = False) -> Self:
        """Returns the model in a folder. config: the folder's own, as it was read. No weight is read."""
        plain = copy.deepcopy(config)
        for part in (plain, plain.get_text_config(decoder=True)):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.device("meta"):
            model = factory.from_config(plain, trust_remote_code=trust_remote_code)
        layers = {path: layer for path, module in model.named_modules() if (layer := _layer(module)) is not None}
        paths = {id(module): path for path, module in model.named_modules()}
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        tied = {}
        if head is not None and head.weight is embeddings.weight:
            tied[paths[id(head)]] = paths[id(embeddings)]
        prefix = f"{model.base_model_prefix}."
        # T5 scales what its head gets only where the weight is shared.
        may_untie = not config.is_encoder_decoder
        text = plain.get_text_config(decoder=True)
        return cls(folder, text, layers, prefix, tied, may_untie, find_quantization(folder, config, None))

    def names(self, path: str) -> list[str]:
        """Returns the names that a checkpoint may have for the module at a path."""
        names = [path, path.removeprefix(self.prefix), f"{self.prefix}{path}", *_OLD_NAMES.get(path, ())]
        return names + (self.names(self.tied[path]) if path in self.tied else [])

    @contextmanager
    def weights(self) -> Iterator[BaseWeights]:
        """Yields the weights of the checkpoint, which are read one by one. Raises ModelNotFound or InvalidWeights."""
        with ExitStack() as stack:
            files = open_checkpoint(self.folder, quantization=self.quantization)
            yield BaseWeights(lambda: stack.enter_context(files), self)


def _layer(module: nn.Module) -> BaseLayer | None:
    if type(module) is Conv1D:
        weight = cast(Tensor, module.weight)
        inputs, outputs = weight.shape
        return BaseLayer(inputs, outputs, transposed=True)
    if isinstance(module, nn.Linear):
        return BaseLayer(module.in_features, module.out_features)
    return None
