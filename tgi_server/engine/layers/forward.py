"""A short forward pass for models whose decoder layers are one kernel call.

The forward pass of a model of `transformers` makes masks, reads its configuration and collects outputs of every kind.
When all layers are one kernel call, that takes most of the time that Python spends in a step. Here a pass does no more
than embed the tokens, call the layers, and apply the last norm and the head.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.layers.decoder import LayerStack
from tgi_server.engine.layers.head import ScreenedHead
from tgi_server.engine.layers.norm import Norm
from tgi_server.engine.layers.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The result of a pass. logits: [1, tokens, vocab_size]."""

    logits: Tensor


def shorten_forward(model: nn.Module) -> None:
    """Replaces the model's forward, if it is known and its layers are in a LayerStack or a few."""
    forward = _FORWARDS.get(type(model).__name__)
    if forward is not None and isinstance(forward.inside(model).layers[0], LayerStack):
        model.forward = forward(model)


class _Forward(ABC):
    """The steps of one architecture before and after its decoder layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._inside = self.inside(model)
        self._head = model.get_output_embeddings()

    @staticmethod
    @abstractmethod
    def inside(model: Any) -> Any:
        """Returns the module that holds all of a model but its head."""

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: PagedCache,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> ForwardOutput:
        metadata = past_key_values.metadata
        assert metadata is not None
        hidden, rotation = self._before(input_ids, position_ids, metadata.max_kv_length)
        wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        *stacks, last = self._inside.layers
        for layers in stacks:
            hidden = layers(hidden, past_key_values=past_key_values, position_embeddings=rotation)
        hidden = last(hidden, past_key_values=past_key_values, position_embeddings=rotation, wanted=wanted)
        hidden = self._after(hidden)
        if isinstance(self._head, ScreenedHead):
            return ForwardOutput(self._head(hidden, metadata=metadata))
        return ForwardOutput(self._head(hidden))

    @abstractmethod
    def _before(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Returns the layers' input and the rotary tables, if any. tokens, positions: [1, tokens], below `length`."""

    @abstractmethod
    def _after(self, hidden: Tensor) -> Tensor:
        """Returns the head's input, given the layers' output."""


class _LlamaForward(_Forward):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._rotary = RotaryTable(self._inside.rotary_emb)
        self._norm = Norm.of_rms_norm(self._inside.norm)

    @staticmethod
    def inside(model: Any) -> Any:
        return model.model

    def _before(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = self._inside.embed_tokens(tokens)
        return hidden, self._rotary(hidden, positions, length)

    def _after(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden)


class _OptForward(_Forward):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        norm = self._inside.final_layer_norm
        self._norm = Norm.of_layer_norm(norm) if norm is not None else None

    @staticmethod
    def inside(model: Any) -> Any:
        return model.model.decoder

    def _before(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, None]:
        inside, places = self._inside, self._inside.embed_positions
        hidden = inside.embed_tokens(tokens)
        if inside.project_in is not None:
            hidden = inside.project_in(hidden)
        return hidden + embedding(positions + places.offset, places.weight), None

    def _after(self, hidden: Tensor) -> Tensor:
        if self._norm is not None:
            hidden = self._norm(hidden)
        if self._inside.project_out is not None:
            hidden = self._inside.project_out(hidden)
        return hidden


# By the class of `transformers`.
_FORWARDS: dict[str, type[_Forward]] = {
    "LlamaForCausalLM": _LlamaForward,
    "MistralForCausalLM": _LlamaForward,
    "Qwen2ForCausalLM": _LlamaForward,
    "OPTForCausalLM": _OptForward,
}
