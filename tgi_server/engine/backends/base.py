"""The interface of a model that runs steps over the paged KV cache, and of a backend, which makes one for a device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.lora import AdaptedLinear, AdapterRows, LoraBackend
from tgi_server.engine.backends.rope import LengthDependentRope
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.models.spec import DecoderSpec, Family
from tgi_server.engine.parallel.layers import VocabParallelHead
from tgi_server.engine.sampling.masks import PendingMask

# Takes the head's input, [rows, hidden_size], and the inputs of some layers, [tokens, hidden_size] each.
Keep = Callable[[Sequence[Tensor]], None]
# Creates the LoRA backend of a linear layer, from its outputs and the number of layers of the base model that it fuses.
MakeLora = Callable[[int, int], LoraBackend]


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """The image tokens of a pass.

    rows: [tokens] int64, their indices among the pass's tokens. embeddings: [tokens, hidden_size], which replace the
    token embeddings. added: a tensor [tokens, hidden_size] for each of the first layers, added to its output.
    """

    rows: Tensor
    embeddings: Tensor
    added: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class TopOnly:
    """Marks a pass that needs only the largest logits of each row; the others may be minus infinity.

    count: number of logits; further ones that are equal to the last of them after rounding are needed, too. mask: mask
    of the rows with a grammar, which need the largest of the allowed logits.
    """

    count: int
    mask: PendingMask | None


@dataclass(frozen=True, slots=True)
class PassInput:
    """The tokens of a step, with their positions, adapters and metadata.

    tokens, positions: [tokens] int64. wanted: [rows] int64, indices of the tokens whose logits are needed; None: all.
    adapters: adapters of the tokens; None: no token has one. images: image tokens; None: none.
    rotary: rotary positions, [tokens] int64, or [3, tokens] for time, height and width (Qwen2-VL, arXiv:2409.12191);
    None: `positions`.
    top: None: every logit of the wanted tokens is needed.
    """

    tokens: Tensor
    positions: Tensor
    metadata: ForwardMetadata
    wanted: Tensor | None
    adapters: AdapterRows | None = None
    images: ImageTokens | None = None
    rotary: Tensor | None = None
    top: TopOnly | None = None


class PagedModel(ABC):
    """A model that runs steps over the paged KV cache: a spec on a device, or the forward pass of `transformers`.

    source: the model of `transformers` that it was made from; its configuration, embeddings and head stay there.
    attention: attention backend with the KV blocks. kv_shape: shape of the cache of `transformers`' layers, which may
    differ from the blocks. adapted: True if rows can have adapters. states: states of the recurrent layers; None: there
    are none. positions: maximum length of a text in tokens; None: unlimited. name: description of the forward pass for
    the log.
    """

    name = "transformers"

    attention: AttentionBackend
    adapted = False
    states: SequenceStates | None = None
    positions: int | None = None

    def __init__(self, source: nn.Module, attention: AttentionBackend) -> None:
        self.source = source
        self.attention = attention
        self.kv_shape = attention.shape
        self._rope = LengthDependentRope(source)

    def allocate(self, num_blocks: int) -> None:
        """Allocates KV blocks 0 .. num_blocks - 1 and drops the earlier contents."""
        self.attention.allocate(num_blocks)

    def attach_rows(  # noqa: B027
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        adapters: Tensor,
        rope_deltas: Tensor,
        state_slots: Tensor,
    ) -> None:
        """Sets the tensors of the rows, which `decode` reads and writes.

        tokens, positions: [rows] int64. tables: [rows, blocks] int32. adapters: [rows] int32. rope_deltas: [rows]
        int64, rotary position minus position. state_slots: [rows] int64.
        """

    def decode(
        self, rows: int, longest: int, top: TopOnly | None, *, adapted: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Decodes the first of the attached rows in one call, and advances their positions.

        Returns their logits, [rows, vocab_size], and the argmax of each row, [rows] int64, or None; None for both if
        the model has no such call. The argmax becomes the row's next input.

        longest: an upper bound of the rows' lengths, this token included. adapted: some row has an adapter.
        """
        return None

    @abstractmethod
    def forward(self, inputs: PassInput) -> Tensor:
        """Returns the logits of the wanted tokens, [rows, vocab_size]."""

    @property
    def split_head(self) -> VocabParallelHead | None:
        """The head, if its logits can stay split by shards; None: they are gathered, or there is one shard."""
        return None

    def tap(self, layers: Sequence[int], keep: Keep) -> None:
        """Makes every pass call `keep` with the inputs of some layers. layers: their indices, in ascending order."""
        raise NotImplementedError(f"nobody reads the hidden states of a {type(self).__name__}")

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        """Returns the linear layers that adapters may change. Later passes apply the LoRA deltas put there."""
        return []

    def rounding_modules(self) -> list[nn.Module]:
        """Returns modules that each round their outputs."""
        return [module for module in self.source.modules() if not any(True for _ in module.children())]

    def fix_length(self, tokens: int) -> None:
        """Fixes rotary positions that depend on the length of a text to the length `tokens`."""
        self._rope.fix(tokens)


class Backend(ABC):
    """The parts that compute one model on a device: linear layers, attention, LoRA deltas, and whole models of specs.

    linear_kernels: names of the kernels of linear layers for the log. fallbacks: reasons for parts that run on slower
    code than the device allows. where: the device as part of a sentence. cheap_tokens: tokens that a step computes in
    the time of reading the weights. fixed_memory: True if the memory of the largest step must be measured before the
    cache is sized. spare_cores: number of cores left to grammars. samples_on_cpu: True if the CPU's kernels sample.
    """

    linear_kernels = "torch"
    where: str
    cheap_tokens: int
    fixed_memory: bool
    spare_cores: int
    samples_on_cpu = False

    def __init__(self, source: PreTrainedModel, config: EngineConfig) -> None:
        """source: the model of `transformers`. Raises UnsupportedModel for kernels that the device does not have."""
        self.source = source
        self.config = config
        self.group = config.group
        self.fallbacks: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what `resume` sets."""
        return self.__dict__ | {"config": None, "group": None}

    def resume(self, config: EngineConfig) -> None:
        """Sets the settings of this process in a backend that another process has made and stored."""
        self.config, self.group = config, config.group

    @property
    def device_type(self) -> str:
        """The type of the device, such as cpu or cuda."""
        return self.source.device.type

    @abstractmethod
    def create_model(self, family: Family, spec: DecoderSpec | None) -> PagedModel | None:
        """Returns the model on the paged KV cache; None if it has to run in padded batches.

        family, spec: family and spec of the model; a spec is used if its results match those of `transformers`. Raises
        UnsupportedModel if neither is right. All shards of a model make the same choice.
        """

    @abstractmethod
    def attention(self, shape: KVShape, kv_format: KVFormat | None = None) -> AttentionBackend:
        """Returns the fastest correct attention for a model. kv_format: None: keys and values in the model's dtype."""

    @abstractmethod
    def lora(self, max_rank: int) -> MakeLora:
        """Returns the function that creates LoRA backends of linear layers. max_rank: maximum rank of an adapter."""

    @abstractmethod
    def layer_model(
        self,
        source: PreTrainedModel,
        spec: DecoderSpec,
        variants: Mapping[int, AttentionVariant],
        embedding: nn.Module | None,
        head: nn.Module | None,
    ) -> PagedModel:
        """Returns a drafter of one layer, computed by its spec without a comparison with `transformers`.

        source: module with its weights. variants: attention of the layers beyond the spec. embedding, head: those of
        another model, if it has none. Raises Unfit if the spec does not describe it.
        """

    def pack(self, module: nn.Module) -> None:  # noqa: B027
        """Packs the linear layers of a further module, if the device has a packed layout."""

    def pack_source(self) -> None:  # noqa: B027
        """Packs the linear layers of a model that runs in padded batches, if the device has a packed layout."""

    def unpack_source(self) -> bool:
        """Undoes `pack_source`. Returns False if there is nothing to undo."""
        return False
