"""Models that read texts and write none: embeddings of texts, and scores of texts or of pairs.

The forward pass is that of `transformers`. The other steps that the files of sentence-transformers name (pooling, dense
layers, normalisation) are done here.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import linear, normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from tgi_server.contract import Task
from tgi_server.engine.checkpoint.load_model import load_tensors
from tgi_server.engine.checkpoint.model_folder import ModelFolder
from tgi_server.engine.checkpoint.reader import read_tensors
from tgi_server.engine.checkpoint.weight_files import check_files, stored_dtype
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.linear import linear_factory
from tgi_server.engine.memory import HOST
from tgi_server.engine.models.families import family_of
from tgi_server.grammar.tokenizer import read_definition

logger = logging.getLogger(__name__)

# In the order in which sentence-transformers concatenates their results.
_POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
}
# The modules of sentence-transformers that are known: the last part of their types.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS: dict[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU}
# Marks a conversation in the form of Qwen3-Reranker, which answers yes or no.
_CONVERSATION = "<|im_start|>"
# A batch of texts with this many tokens is closed rather than filled with texts that are much shorter.
_ENOUGH_TOKENS = 512
_MOST_PADDING = 1 / 8


class Text(Protocol):
    """A text to encode. ids: its tokens. second: index of the first token of a pair's second text; 0: there is none."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def second(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """The facts about a model that embeds or ranks.

    max_tokens: maximum tokens of a text. columns: number of elements of an embedding, or of labels. labels: the labels'
    names. answers: True for a decoder that scores a conversation by answering yes or no.
    """

    task: Task
    model_type: str
    dtype: str
    device_type: str
    vocab_size: int
    max_tokens: int
    columns: int
    labels: tuple[str, ...]
    answers: bool
    pooling: str


class Encoder:
    """One model. Not thread-safe.

    between: called before each layer, so that a caller can let others compute meanwhile.
    """

    def __init__(self, task: Task, config: EngineConfig) -> None:
        """Loads the model. Raises an EngineError that says what is wrong with the folder."""
        folder = config.model_path
        self._device = config.device
        model_config = ModelFolder.read(folder, trust_remote_code=config.trust_remote_code).model
        check_files(folder)
        # On a CPU the values are those of `transformers` in float32, whatever the chat model is computed in.
        dtype = torch.float32 if self._device == HOST else config.dtype or stored_dtype(folder) or torch.float32
        kind = _kind(task, folder, model_config)
        model = self._model = _load(kind, config, model_config, dtype).to(self._device)
        self._answer = _yes_or_no(folder, model) if kind is AutoModelForCausalLM else None
        self._modules = _Modules(folder, model_config) if task == "embed" else None
        self._pads = task == "embed" or self._answer is not None or model_config.pad_token_id is not None
        self._pad_id = model_config.pad_token_id or 0
        self._arguments = inspect.signature(model.forward).parameters
        self._types = "token_type_ids" in self._arguments and (getattr(model_config, "type_vocab_size", 0) or 0) > 1
        self.between: Callable[[], None] = lambda: None
        layers = _layers(model)
        for layer in layers:
            layer.register_forward_pre_hook(self._pause)
        self.layers = max(len(layers), 1)
        if self._device == HOST and config.custom_kernels:
            _pack_linears(model)
        labels = getattr(model_config, "id2label", None) or {}
        names = tuple(str(labels[index]) for index in sorted(labels)) if kind is _CLASSIFIER else ()
        self.info = LoadedEncoder(
            task=task,
            model_type=model_config.model_type,
            dtype=str(dtype).removeprefix("torch."),
            device_type=self._device.type,
            vocab_size=model_config.vocab_size,
            max_tokens=_most_tokens(folder, model_config),
            columns=self._modules.columns(model_config) if self._modules else len(names) or 1,
            labels=names,
            answers=self._answer is not None,
            pooling="+".join(self._modules.poolings) if self._modules else "",
        )

    @torch.inference_mode()
    def encode(self, texts: Sequence[Text]) -> Tensor:
        """Returns [texts, columns] in float32 on the host: embeddings, or logits of labels."""
        lengths = [len(text.ids) for text in texts]
        longest = max(lengths)
        padded = [[*text.ids, *[self._pad_id] * (longest - len(text.ids))] for text in texts]
        inputs: dict[str, Tensor] = {"input_ids": torch.tensor(padded, device=self._device)}
        ends = torch.tensor(lengths, device=self._device)
        if longest > min(lengths):
            inputs["attention_mask"] = (torch.arange(longest, device=self._device) < ends[:, None]).long()
        if self._types and any(text.second for text in texts):
            types = [
                [int(0 < text.second <= position < len(text.ids)) for position in range(longest)] for text in texts
            ]
            inputs["token_type_ids"] = torch.tensor(types, device=self._device)
        more = {"use_cache": False} if "use_cache" in self._arguments else {}
        if self._modules is None and self._answer is None:
            return self._model(**inputs, **more).logits.float().cpu()
        base = self._model if self._answer is None else self._model.base_model
        hidden = base(**inputs, **more).last_hidden_state.float()
        if self._modules is not None:
            return self._modules(hidden, ends).cpu()
        assert self._answer is not None
        return linear(_last_tokens(hidden, ends), self._answer).cpu()

    def batches(self, texts: Sequence[Text], most_tokens: int) -> Iterator[list[int]]:
        """Yields batches of texts, as indices. The texts of a batch have similar lengths, which saves padding.

        most_tokens: maximum number of tokens of a batch with more than one text.
        """
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index].ids))
        batch: list[int] = []
        for index in order:
            length, longest = len(texts[index].ids), len(texts[batch[0]].ids) if batch else 0
            tokens = longest * len(batch)
            padding = (longest - length) / max(longest, 1)
            if batch and (
                tokens + longest > most_tokens
                or (tokens >= _ENOUGH_TOKENS and padding > _MOST_PADDING)
                or (padding and not self._pads)
            ):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _pause(self, *_: Any) -> None:
        self.between()


_CLASSIFIER: Any = AutoModelForSequenceClassification


def finished(values: Tensor, dimensions: int, *, unit: bool) -> Tensor:
    """Returns the first `dimensions` elements of embeddings (0: all), scaled to length 1 if `unit`."""
    values = values[:, :dimensions] if dimensions else values
    return normalize(values, dim=1) if unit else values


class _Modules:
    """The modules of sentence-transformers after the model: pooling and dense layers. `Normalize` is ignored: a request
    decides if embeddings are scaled to length 1, as in Text Embeddings Inference.

    Without these files the embedding is that of the last token for decoders, and the mean of all tokens otherwise.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        """Raises UnsupportedModel for a module that is not known."""
        listed = _read(folder / "modules.json", [])
        kinds = [
            (str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))) for module in listed
        ]
        if unknown := [kind for kind, _ in kinds if kind not in _MODULES]:
            raise UnsupportedModel(f"{folder / 'modules.json'} has {unknown[0]}; served are {', '.join(_MODULES)}")
        self.poolings: tuple[str, ...] = ("lasttoken",) if _is_decoder(config) else ("mean",)
        if not kinds:
            logger.warning("%s has no modules.json: pooling is %s", folder, self.poolings[0])
        self._dense: list[tuple[Tensor, Tensor | None, nn.Module]] = []
        for kind, path in kinds:
            if kind == "Pooling":
                self.poolings = _poolings(path / "config.json")
            if kind == "Dense":
                self._dense.append(_dense(path))

    def columns(self, config: PretrainedConfig) -> int:
        return len(self._dense[-1][0]) if self._dense else len(self.poolings) * int(config.hidden_size)

    def __call__(self, hidden: Tensor, ends: Tensor) -> Tensor:
        """hidden: [texts, tokens, hidden_size]. ends: tokens of each text. Returns [texts, columns]."""
        values = torch.cat([_pooled(name, hidden, ends) for name in self.poolings], 1)
        for weight, bias, activation in self._dense:
            bias = bias if bias is None else bias.to(values.device)
            values = activation(linear(values, weight.to(values.device), bias))
        return values


def _pooled(name: str, hidden: Tensor, ends: Tensor) -> Tensor:
    if name == "cls":
        return hidden[:, 0]
    if name == "lasttoken":
        return _last_tokens(hidden, ends)
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    mask = (positions < ends[:, None])[:, :, None]
    if name == "max":
        return hidden.masked_fill(~mask, -torch.inf).amax(1)
    if name == "weightedmean":
        weights = mask * (positions + 1.0)[:, None]
        return (hidden * weights).sum(1) / weights.sum(1)
    total = (hidden * mask).sum(1)
    return total / (ends[:, None] if name == "mean" else ends[:, None].sqrt())


def _last_tokens(hidden: Tensor, ends: Tensor) -> Tensor:
    return hidden[torch.arange(len(ends), device=hidden.device), ends - 1]


def _poolings(file: Path) -> tuple[str, ...]:
    """Returns the kinds of pooling that a file names. Raises UnsupportedModel."""
    config = _read(file, {})
    named = config.get("pooling_mode") or [name for key, name in _LEGACY_POOLINGS.items() if config.get(key)] or "mean"
    named = [named] if isinstance(named, str) else named
    if unknown := [name for name in named if name not in _POOLINGS]:
        raise UnsupportedModel(f"{file}: the pooling {unknown[0]!r} is not served; it must be one of {_POOLINGS}")
    if config.get("include_prompt") is False:
        raise UnsupportedModel(f"{file}: pooling without the tokens of the prompt is not served")
    return tuple(name for name in _POOLINGS if name in named)


def _dense(folder: Path) -> tuple[Tensor, Tensor | None, nn.Module]:
    config = _read(folder / "config.json", {})
    name = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    if name not in _ACTIVATIONS or config.get("use_residual"):
        raise UnsupportedModel(f"{folder / 'config.json'}: a dense layer with {name} and residuals is not served")
    try:
        weights = read_tensors(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise InvalidWeights(f"{folder} needs its weights in model.safetensors: {error}") from error
    bias = weights.get("linear.bias")
    return weights["linear.weight"].float(), None if bias is None else bias.float(), _ACTIVATIONS[name]()


def _kind(task: Task, folder: Path, config: PretrainedConfig) -> Any:
    """Returns the class of `transformers` that loads the model. Raises UnsupportedModel for one that does not rank."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{folder}: {config.model_type} is an encoder-decoder, which is not served here")
    if task == "embed":
        return AutoModel
    names = config.architectures or [""]
    if any("SequenceClassification" in name for name in names):
        return _CLASSIFIER
    if any("CausalLM" in name for name in names):
        return AutoModelForCausalLM
    raise UnsupportedModel(f"{folder}: {names[0]} does not score texts; --rerank-model-id takes sequence classifiers")


def _load(kind: Any, config: EngineConfig, model_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Loads the weights. Raises InvalidWeights when some are missing, and UnsupportedModel."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    folder = config.model_path
    try:
        model, report = load_tensors(
            folder, model_config, kind, dtype, HOST, None, trust_remote_code=config.trust_remote_code
        )
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        raise UnsupportedModel(f"{folder} cannot be loaded: {(str(error).splitlines() or [''])[0]}") from error
    # Embeddings use the last layer's output, so the pooler that some models have after it may be missing.
    missing = sorted(name for name in report["missing_keys"] if not (kind is AutoModel and "pooler." in name))
    if missing:
        raise InvalidWeights(f"{folder}: weights are missing: {', '.join(missing[:3])}")
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _yes_or_no(folder: Path, model: PreTrainedModel) -> Tensor:
    """Returns the difference of the head's rows for yes and no, [1, hidden_size]. Raises UnsupportedModel."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_str(read_definition(folder)) if file.is_file() else None
    yes, no, mark = (
        ([tokenizer.token_to_id(word) for word in ("yes", "no", _CONVERSATION)]) if tokenizer else [None] * 3
    )
    if yes is None or no is None or mark is None:
        raise UnsupportedModel(
            f"{folder} writes text; --rerank-model-id takes sequence classifiers, and decoders in the form of "
            "Qwen3-Reranker, which answer yes or no"
        )
    weight = model.get_output_embeddings().weight
    return (weight[yes].float() - weight[no].float())[None]


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def _pack_linears(model: PreTrainedModel) -> None:
    """Computes linear layers with the engine's kernels, where they are compiled."""
    factory = linear_factory(model, torch.float32, None)
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and module.in_features % 16 == 0:
            model.set_submodule(path, factory(module))


def _is_decoder(config: PretrainedConfig) -> bool:
    return any("CausalLM" in name for name in config.architectures or ())


def _most_tokens(folder: Path, config: PretrainedConfig) -> int:
    """Returns the maximum number of tokens of a text: the smallest limit in the model's files, or 512."""
    said = [
        family_of(config).positions(config),
        _read(folder / "sentence_bert_config.json", {}).get("max_seq_length"),
        _read(folder / "tokenizer_config.json", {}).get("model_max_length"),
    ]
    return int(min((limit for limit in said if isinstance(limit, int) and limit > 0), default=512))


def _read(file: Path, default: Any) -> Any:
    """Returns the JSON of a file, or `default` where there is no file. Raises UnsupportedModel."""
    if not file.is_file():
        return default
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, type(default)):
        raise UnsupportedModel(f"{file} is not what sentence-transformers writes; download it again")
    return content
