"""The base model of adapters: its linear layers, and their weights in the checkpoint."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.checkpoint.fill import by_model_names, name_in_model
from tgi_server.engine.checkpoint.load_model import model_factory, without_quantization
from tgi_server.engine.checkpoint.quantized import Quantization, find_quantization
from tgi_server.engine.checkpoint.reader import Checkpoint, QuantizedTensor, SlicedTensor, open_checkpoint
from tgi_server.engine.errors import InvalidAdapter

# Names in checkpoints of modules that have other names in the model: of GPT-NeoX.
_OLD_NAMES = {"lm_head": ("embed_out",)}
# Names of modules that contain the layers of a language model, in some version of a model.
_WRAPPERS = re.compile(r"(?:(?:base_model|model|language_model|text_model)\.)+")


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """A linear layer of the whole base model. transposed: True if its weight is [in_features, out_features]."""

    in_features: int
    out_features: int
    transposed: bool = False


class BaseWeights:
    """The weights and biases of a model's checkpoint, by the paths of layers in the model."""

    def __init__(self, open_files: Callable[[], Checkpoint], base: "BaseModel") -> None:
        """open_files: opens the checkpoint; called when the first tensor is read, as most adapters need none."""
        self._open_files = open_files
        self._base = base

    @cached_property
    def _tensors(self) -> Checkpoint:
        return by_model_names(self._base.changes, self._open_files())

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
        """Returns a tensor of the module at `path` unchanged from the checkpoint; None if there is none."""
        found = self._find(path, tensor)
        return None if found is None else found[...]

    def _find(self, path: str, tensor: str) -> SlicedTensor | QuantizedTensor | None:
        found = (self._tensors.get(f"{name}.{tensor}") for name in self._base.names(path))
        return next((tensor for tensor in found if tensor is not None), None)


@dataclass(frozen=True)
class BaseModel:
    """The base model of adapters: the whole model of `transformers`, even if shards or other layers compute it.

    config: the config of its language model. layers: its linear layers, by path. image_layers: paths of those that
    process images. prefix: prefix of paths in the model without its head. text_prefix: prefix of paths in the language
    model. tied: path of the head -> path of the embeddings, if they share their weight. may_untie: True if the model
    computes the same when head and embeddings have separate copies of the weight. changes: the renamings of checkpoint
    tensors in `transformers`.
    """

    folder: Path
    config: PretrainedConfig
    layers: Mapping[str, BaseLayer]
    image_layers: frozenset[str]
    prefix: str
    text_prefix: str
    tied: Mapping[str, str]
    may_untie: bool
    quantization: Quantization | None
    changes: Sequence[Any]

    @classmethod
    def of(cls, folder: Path, config: PretrainedConfig, *, trust_remote_code: bool = False) -> Self:
        """Describes the model in a folder, without reading weights. config: the folder's config, unchanged."""
        plain = without_quantization(config)
        factory = model_factory(config)
        with torch.device("meta"):
            model = factory.from_config(plain, trust_remote_code=trust_remote_code)
            image_layers = _image_layers(plain, model)
        paths = {id(module): path for path, module in model.named_modules()}
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        tied = {}
        if head is not None and head.weight is embeddings.weight:
            tied[paths[id(head)]] = paths[id(embeddings)]
        prefix = f"{model.base_model_prefix}."
        # T5 scales the input of its head only if the weight is shared.
        may_untie = not config.is_encoder_decoder
        text = plain.get_text_config(decoder=True)
        return cls(
            folder,
            text,
            _layers(model) | image_layers,
            frozenset(image_layers),
            prefix,
            prefix if config.is_encoder_decoder else paths[id(embeddings)].rpartition(".")[0] + ".",
            tied,
            may_untie,
            find_quantization(folder, config, None),
            get_model_conversion_mapping(model),
        )

    def paths(self, path: str) -> list[str]:
        """Returns the paths that a module of an adapter's model may have in this model.

        The adapter's model may be the language model alone, or one whose language model is in modules of other names.
        """
        found = [path, f"{self.prefix}{path}", path.removeprefix(self.prefix)]
        if (name := name_in_model(self.changes, f"{path}.weight")) is not None:
            found.append(name.removesuffix(".weight"))
        bare = path[match.end() :] if (match := _WRAPPERS.match(path)) else path
        return [*found, f"{self.text_prefix}{bare}", bare]

    def names(self, path: str) -> list[str]:
        """Returns the names that the module at `path` may have in a checkpoint."""
        names = [path, path.removeprefix(self.prefix), f"{self.prefix}{path}", *_OLD_NAMES.get(path, ())]
        return names + (self.names(self.tied[path]) if path in self.tied else [])

    @contextmanager
    def weights(self) -> Iterator[BaseWeights]:
        """Yields the weights of the checkpoint, which are read on demand. Raises ModelNotFound or InvalidWeights."""
        with ExitStack() as stack:
            files = open_checkpoint(self.folder, quantization=self.quantization)
            yield BaseWeights(lambda: stack.enter_context(files), self)


def _layers(model: nn.Module) -> dict[str, BaseLayer]:
    return {path: layer for path, module in model.named_modules() if (layer := _layer(module)) is not None}


def _image_layers(config: PretrainedConfig, model: PreTrainedModel) -> dict[str, BaseLayer]:
    """Returns the linear layers outside the language model, by path, for a model that also reads images.

    model: the loaded model, which may be the language model alone.
    """
    whole_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if whole_class is None:
        return {}
    whole = model if type(model) is whole_class else whole_class(config)
    language_model, head = whole.get_decoder(), whole.get_output_embeddings()
    text = {id(module) for part in (language_model, head) if part is not None for module in part.modules()}
    others = {path for path, module in whole.named_modules() if id(module) not in text}
    return {path: layer for path, layer in _layers(whole).items() if path in others}


def _layer(module: nn.Module) -> BaseLayer | None:
    if type(module) is Conv1D:
        weight = cast(Tensor, module.weight)
        inputs, outputs = weight.shape
        return BaseLayer(inputs, outputs, transposed=True)
    if isinstance(module, nn.Linear):
        return BaseLayer(module.in_features, module.out_features)
    return None
