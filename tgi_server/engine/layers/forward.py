"""A short forward pass for models whose decoder layers are one kernel call.

The forward pass of a model of `transformers` makes masks, reads its configuration and collects outputs of every kind.
When all layers are one kernel call, that takes most of the time that Python spends in a step. Here a pass does no more
than embed the tokens, call the layers, and apply the last norm and the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.layers.decoder import LayerStack
from tgi_server.engine.layers.head import ScreenedHead
from tgi_server.engine.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The result of a pass. logits: [1, tokens, vocab_size]."""

    logits: Tensor


def shorten_forward(model: nn.Module) -> None:
    """Replaces the model's forward, if it is known and its layers are in a LayerStack or a few."""
    around = _AROUND.get(type(model).__name__)
    if around is not None and isinstance(around.inside(model).layers[0], LayerStack):
        model.forward = _Forward(cast(PreTrainedModel, model), around)


@dataclass(frozen=True, slots=True)
class _Around:
    """The steps of one architecture before and after its decoder layers.

    inside: returns the module of a model that holds all but its head.
    before: (that module, tokens, positions; [1, tokens] both) -> the layers' input and the rotary tables, if any.
    after: (that module, the layers' output) -> the head's input.
    """

    inside: Callable[[Any], Any]
    before: Callable[[Any, Tensor, Tensor], tuple[Tensor, tuple[Tensor, Tensor] | None]]
    after: Callable[[Any, Tensor], Tensor]


class _Forward:
    def __init__(self, model: PreTrainedModel, around: _Around) -> None:
        self._inside = around.inside(model)
        self._head = model.get_output_embeddings()
        self._before, self._after = around.before, around.after

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: PagedCache,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> ForwardOutput:
        hidden, rotation = self._before(self._inside, input_ids, position_ids)
        wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        *stacks, last = self._inside.layers
        for layers in stacks:
            hidden = layers(hidden, past_key_values=past_key_values, position_embeddings=rotation)
        hidden = last(hidden, past_key_values=past_key_values, position_embeddings=rotation, wanted=wanted)
        hidden = self._after(self._inside, hidden)
        if isinstance(self._head, ScreenedHead):
            return ForwardOutput(self._head(hidden, metadata=past_key_values.metadata))
        return ForwardOutput(self._head(hidden))


def _before_llama(inside: Any, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    hidden = inside.embed_tokens(tokens)
    return hidden, inside.rotary_emb(hidden, position_ids=positions)


def _after_llama(inside: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = inside.norm(hidden)
    return normed


def _before_opt(inside: Any, tokens: Tensor, positions: Tensor) -> tuple[Tensor, None]:
    hidden = inside.embed_tokens(tokens)
    if inside.project_in is not None:
        hidden = inside.project_in(hidden)
    places = inside.embed_positions
    return hidden + embedding(positions + places.offset, places.weight), None


def _after_opt(inside: Any, hidden: Tensor) -> Tensor:
    if inside.final_layer_norm is not None:
        hidden = Norm.of_layer_norm(inside.final_layer_norm)(hidden)
    if inside.project_out is not None:
        hidden = inside.project_out(hidden)
    return hidden


_LLAMA = _Around(lambda model: model.model, _before_llama, _after_llama)
# By the class of `transformers`.
_AROUND = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "OPTForCausalLM": _Around(lambda model: model.model.decoder, _before_opt, _after_opt),
}
