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
# Makes what computes a layer's LoRA deltas, from its outputs and the number of the base model's layers that it joins.
MakeLora = Callable[[int, int], LoraBackend]


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """The tokens of a pass whose embeddings are those of images.

    rows: [tokens] int64, their indices among the pass's tokens. embeddings: [tokens, hidden_size], which take the place
    of those of the tokens. added: [tokens, hidden_size] for each of the first layers, to whose output it is added.
    """

    rows: Tensor
    embeddings: Tensor
    added: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class TopOnly:
    """Marks a pass that needs only the largest logits of each row; the others may be minus infinity.

    count: how many; those that are equal to the last of them once they are rounded are needed, too. mask: of rows with
    a grammar; they need the largest of the logits that it allows.
    """

    count: int
    mask: PendingMask | None


@dataclass(frozen=True, slots=True)
class PassInput:
    """The tokens of a step, with their positions, adapters and metadata.

    tokens, positions: [tokens] int64. wanted: [rows] int64, indices of the tokens whose logits are wanted; None: all.
    adapters: of the tokens; None: none has one. images: None: there are none.
    rotary: the positions by which queries and keys are turned, [tokens] int64, or [3, tokens] of time, height and width
    (Qwen2-VL, arXiv:2409.12191); None: `positions`.
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
    attention: has the KV blocks, and attends over them. kv_shape: of what the layers of `transformers` cache, which
    may be arranged otherwise there. adapted: rows may have adapters.
    states: of the layers without keys; None: there are no such layers. positions: of the longest text; None: nothing
    bounds it. name: how a step is computed, for people.
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
        """Takes the tensors of the rows that `decode` reads and writes.

        tokens, positions: [rows] int64. tables: [rows, blocks] int32. adapters: [rows] int32. rope_deltas: [rows]
        int64, rotary positions less positions. state_slots: [rows] int64.
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
        """The head, if its logits may stay apart by shards; None: they are brought together, or there is one shard."""
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
        """Makes rotary positions that depend on a text's length those of a text of `tokens` tokens."""
        self._rope.fix(tokens)


class Backend(ABC):
    """The parts that compute one model on a device: linear layers, attention, LoRA deltas, and whole models of specs.

    linear_kernels: the kernels of linear layers, for people. fallbacks: why parts of the model run in a slower way than
    the device allows. where: the device, in a sentence. cheap_tokens: tokens that a step computes while it waits for
    the weights. fixed_memory: the memory of the largest step must be measured before the cache is sized.
    spare_cores: cores that the model leaves to grammars. samples_on_cpu: the CPU's kernels sample.
    """

    linear_kernels = "torch"
    where: str
    cheap_tokens: int
    fixed_memory: bool
    spare_cores: int
    samples_on_cpu = False

    def __init__(self, source: PreTrainedModel, config: EngineConfig) -> None:
        """source: the model of `transformers`. Raises UnsupportedModel for kernels that the device has not."""
        self.source = source
        self.config = config
        self.group = config.group
        self.fallbacks: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what `resume` sets."""
        return self.__dict__ | {"config": None, "group": None}

    def resume(self, config: EngineConfig) -> None:
        """Takes the settings of this process, where another one made this backend and stored it."""
        self.config, self.group = config, config.group

    @property
    def device_type(self) -> str:
        """The kind of the device, for people."""
        return self.source.device.type

    @abstractmethod
    def create_model(self, family: Family, spec: DecoderSpec | None) -> PagedModel | None:
        """Returns the model on the paged KV cache; None if it has to run in padded batches.

        family, spec: of the model; a spec is used where it is proved to compute what `transformers` does. Raises
        UnsupportedModel where neither is right. All shards of a model come to the same decision.
        """

    @abstractmethod
    def attention(self, shape: KVShape, kv_format: KVFormat | None = None) -> AttentionBackend:
        """Returns the fastest attention that is right for a model. kv_format: None: keys and values in its dtype."""

    @abstractmethod
    def lora(self, max_rank: int) -> MakeLora:
        """Returns the function that creates LoRA backends of linear layers. max_rank: of a layer."""

    @abstractmethod
    def layer_model(
        self,
        source: PreTrainedModel,
        spec: DecoderSpec,
        variants: Mapping[int, AttentionVariant],
        embedding: nn.Module | None,
        head: nn.Module | None,
    ) -> PagedModel:
        """Returns a model by its spec that no forward pass of `transformers` judges: a drafter of one layer.

        source: has its weights. variants: how layers attend, beside what the spec says. embedding, head: of another
        model, if it has none of its own. Raises Unfit for a spec that does not describe it.
        """

    def pack(self, module: nn.Module) -> None:  # noqa: B027
        """Packs the linear layers of a module that is computed beside the model, where the device has a layout."""

    def pack_source(self) -> None:  # noqa: B027
        """Packs the linear layers of a model that runs in padded batches, where the device has a layout."""

    def unpack_source(self) -> bool:
        """Takes `pack_source` back. Returns False if there is nothing to take back."""
        return False
