"""The adapters that a running model has loaded."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from shared.control_groups import available_ram
from tgi_server.engine.backends.lora import AdaptedLinear, LoraDelta
from tgi_server.engine.checkpoint.quantized.weight import taken
from tgi_server.engine.errors import InvalidAdapter, InvalidCall
from tgi_server.engine.lora.adapter import AdapterLayer
from tgi_server.engine.lora.base_model import BaseModel
from tgi_server.engine.lora.reader import read_adapter
from tgi_server.engine.memory import use_device
from tgi_server.engine.models.families import plan_for
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.plan import ShardingPlan
from tgi_server.engine.parallel.shares import Share, share_of

logger = logging.getLogger(__name__)

# Limits of the cache of recently used adapters in the host's memory: bytes, and share of the available memory.
_MOST_RECENT_BYTES = 1 << 30
_SHARE_OF_RAM = 0.1


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter in the layout of the running model.

    rank: largest rank of its layers. deltas: the delta of each linear layer, by the layer's number.
    """

    rank: int
    deltas: Mapping[int, LoraDelta]

    @property
    def nbytes(self) -> int:
        return sum(delta.nbytes for delta in self.deltas.values())

    def to(self, device: torch.device) -> Self:
        """Returns the adapter on another device."""
        return type(self)(self.rank, {index: delta.to(device) for index, delta in self.deltas.items()})


class RecentAdapters:
    """A cache of the most recently used adapters, in the host's memory."""

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes
        self._adapters: OrderedDict[str, ReadAdapter] = OrderedDict()

    def get(self, adapter_id: str, read: Callable[[], ReadAdapter]) -> ReadAdapter:
        """Returns an adapter; calls `read` if it is not cached, and evicts others for it."""
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            adapter = self._adapters[adapter_id] = read()
            self._room -= adapter.nbytes
        self._adapters.move_to_end(adapter_id)
        while self._room < 0:
            _, oldest = self._adapters.popitem(last=False)
            self._room += oldest.nbytes
        return adapter


class LoadedAdapters:
    """Reads adapters, concurrently with the engine's steps, and numbers them. Rows refer to adapters by number.

    Before the first adapter is read, the model's layers are the same as without adapters.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        config: PretrainedConfig,
        adapt: Callable[[], list[AdaptedLinear]],
        group: ShardGroup | None,
        *,
        max_rank: int,
        trust_remote_code: bool,
    ) -> None:
        """folder, config: those of the base model. adapt: makes the linear layers of the running model ready for
        adapters and returns them; called when the first adapter is read. group: the shards of the model, if there are
        several. max_rank: maximum rank of a layer.
        """
        self._model = model
        self._folder = folder
        self._config = config
        self._adapt = adapt
        self._group = group
        self._max_rank = max_rank
        self._trust_remote_code = trust_remote_code
        self._numbers: dict[str, int] = {}
        self._recent = RecentAdapters(min(_MOST_RECENT_BYTES, int(_SHARE_OF_RAM * available_ram())))
        self._lock = threading.Lock()  # for the cached properties, created when the first adapter is read

    def fetch(self, adapter_id: str, folder: Path) -> ReadAdapter:
        """Returns an adapter on the model's device, from the cache in the host's memory or its files.

        adapter_id: has to name the same adapter as long as the engine runs. Call it from one thread only.
        """
        use_device(self._model.device)
        return self._recent.get(adapter_id, partial(self.read, folder)).to(self._model.device)

    def read(self, folder: Path) -> ReadAdapter:
        """Reads an adapter into the host's memory. Thread-safe.

        Raises InvalidAdapter, and ModelNotFound or InvalidWeights for faults of the base model's files.
        """
        with self._lock:
            base = self._base
            split = self._split
            linears = self._linears
        adapter = read_adapter(folder, base, max_rank=self._max_rank)
        adapter = {
            path: layer for path, layer in adapter.items() if path not in base.image_layers or not layer.changes_nothing
        }
        for path in adapter.keys() & base.image_layers:
            raise InvalidAdapter(
                f"{folder} changes {path}, which is of the part that reads images: adapters change the language model "
                "alone; train it with target_modules of the language model, or merge it with peft, and serve the "
                "merged model"
            )
        layers = {path: split(path, layer) for path, layer in adapter.items()}
        known = {path for linear in linears for path, _ in linear.parts}
        for path in layers.keys() - known:
            raise InvalidAdapter(
                f"{folder} changes {path}, which cannot be computed for each token by another adapter; merge the "
                "adapter with peft, and serve the merged model"
            )
        dtype = self._model.dtype
        deltas = ((number, _delta(linear, layers, dtype)) for number, linear in enumerate(linears))
        rank = max((len(layer.a) for layer in adapter.values()), default=0)
        return ReadAdapter(rank, {number: delta for number, delta in deltas if delta is not None})

    @property
    def attached(self) -> bool:
        """True once the linear layers are ready for adapters."""
        return "_linears" in vars(self)

    def warm_up(self) -> None:
        """Warms up all linear layers for adapters, so that adapters loaded later do not delay running requests."""
        for linear in self._linears:
            linear.warm_up(self._model.dtype)

    def put(self, adapter_id: str, adapter: ReadAdapter) -> None:
        """Makes an adapter available to requests from the next step on. Call it between two steps.

        An adapter from `read` is copied to the model's device; one from `fetch` is there already.
        """
        adapter = adapter.to(self._model.device)
        adapter_number = self._numbers.get(adapter_id)
        if adapter_number is None:
            taken = set(self._numbers.values())
            adapter_number = next(free for free in range(1, len(taken) + 2) if free not in taken)
        self._drop(adapter_number)
        for index, delta in adapter.deltas.items():
            self._linears[index].put(adapter_number, delta)
        self._numbers[adapter_id] = adapter_number

    def drop(self, adapter_id: str) -> None:
        """Unloads an adapter, if it is loaded. Call it between two steps."""
        adapter_number = self._numbers.pop(adapter_id, None)
        if adapter_number is not None:
            self._drop(adapter_number)

    def number(self, adapter_id: str) -> int:
        """Returns the number of an adapter; 0 for an empty id. Raises InvalidCall if the adapter is not loaded."""
        if not adapter_id:
            return 0
        adapter_number = self._numbers.get(adapter_id)
        if adapter_number is None:
            raise InvalidCall(f"there is no adapter {adapter_id!r} here; load it before a request names it")
        return adapter_number

    def _drop(self, adapter_number: int) -> None:
        for linear in self._linears:
            linear.drop(adapter_number)

    @cached_property
    def _linears(self) -> list[AdaptedLinear]:
        return self._adapt()

    @cached_property
    def _base(self) -> BaseModel:
        return BaseModel.of(self._folder, self._config, trust_remote_code=self._trust_remote_code)

    @cached_property
    def _split(self) -> Callable[[str, AdapterLayer], AdapterLayer]:
        if self._group is None:
            return lambda path, layer: layer
        plan = plan_for(self._model.config)
        share = share_of(self._group.rank, self._group.world_size, plan.heads)
        return lambda path, layer: _slice(plan, share, path, layer, transposed=self._base.layers[path].transposed)


def _delta(linear: AdaptedLinear, layers: Mapping[str, AdapterLayer], dtype: torch.dtype) -> LoraDelta | None:
    """Returns an adapter's delta of a linear layer; None if it has none. layers: this shard's slices, by path."""
    a, b, firsts, first = [], [], [], 0
    dora_scale = bias_delta = None
    for path, outputs in linear.parts:
        layer = layers.get(path)
        if layer is not None:
            a.append(layer.a.to(dtype))
            b.append(layer.b.to(dtype).t().contiguous())
            firsts.append(first)
            if layer.dora_scale is not None:
                dora_scale = torch.ones(linear.outputs) if dora_scale is None else dora_scale
                dora_scale[first : first + outputs] = layer.dora_scale
            if layer.bias_delta is not None:
                bias_delta = torch.zeros(linear.outputs) if bias_delta is None else bias_delta
                bias_delta[first : first + outputs] = layer.bias_delta
        first += outputs
    return LoraDelta(torch.cat(a), b, firsts, dora_scale, bias_delta) if a else None


def _slice(plan: ShardingPlan, share: Share, path: str, layer: AdapterLayer, *, transposed: bool) -> AdapterLayer:
    """Returns a shard's slice of an adapter's layer, split by column or row like the base model's layer."""
    slice_ = plan.slice(f"{path}.weight")
    if slice_ is None or slice_.axis is None:
        return layer
    if slice_.axis == (1 if transposed else 0):
        outputs = slice_.ranges(share, len(layer.b))
        dora_scale, bias_delta = (
            None if delta is None else taken(delta, outputs, 0) for delta in (layer.dora_scale, layer.bias_delta)
        )
        return AdapterLayer(layer.a, taken(layer.b, outputs, 0), dora_scale, bias_delta)
    inputs = taken(layer.a, slice_.ranges(share, layer.a.shape[1]), 1)
    # Each shard computes a partial sum; shard 0 adds the bias.
    bias_delta = None if layer.bias_delta is None or share.rank > 0 else layer.bias_delta
    return AdapterLayer(inputs, layer.b, layer.dora_scale, bias_delta)
