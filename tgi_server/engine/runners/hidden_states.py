"""Hidden states of the last forward pass, for those who draft from them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from tgi_server.engine.runners.graphs import Recorder

T = TypeVar("T")


class HiddenStates:
    """Holds what some modules of a model get as their input. The next pass overwrites it.

    head: [rows, hidden_size]; what the logits of the last pass were made from, in their order.
    layers: [tokens, hidden_size] each; the inputs of the layers that were asked for, in ascending order.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()) -> None:
        """layers: indices of decoder layers. A model in one kernel call passes them to `keep`; from others hooks do."""
        self.head: Tensor | None = None
        self.layers: list[Tensor | None] = [None] * len(layers)
        self.indices = sorted(layers)
        model.get_output_embeddings().register_forward_pre_hook(self._keep_head, with_kwargs=True)
        for place, index in enumerate(self.indices):
            _module_of(model, index).register_forward_pre_hook(self._keeper(place), with_kwargs=True)

    def recorder(self, record: Recorder) -> Recorder:
        """Returns a recorder of steps that, when they run again, leave what is kept of them as they left it before."""

        def recorded(step: Callable[[], T]) -> Callable[[], T]:
            replay = record(step)
            head, layers = self.head, list(self.layers)

            def run() -> T:
                self.head, self.layers = head, layers
                return replay()

            return run

        return recorded

    def keep(self, inputs: Sequence[Tensor]) -> None:
        """Takes the head's input, and then those of the layers in ascending order."""
        self.head, self.layers = inputs[0], list(inputs[1:])

    def select(self, rows: Tensor) -> None:
        """Keeps some rows of a pass whose tokens all had logits, in this order. rows: [rows] int64."""
        assert self.head is not None
        self.head = self.head.index_select(0, rows)
        self.layers = [None if each is None else each.index_select(0, rows) for each in self.layers]

    def _keep_head(self, _: nn.Module, inputs: tuple[Tensor, ...], __: dict[str, Any]) -> None:
        if inputs[0].dim() == 3:  # [1, rows, hidden_size]; drafters that share the head give it rows alone
            self.head = inputs[0][0]

    def _keeper(self, place: int) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Any]], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            # cloned, for a fused layer may add to its input in place
            self.layers[place] = (inputs[0] if inputs else named["hidden_states"])[0].clone()

        return keep


def _module_of(model: PreTrainedModel, index: int) -> nn.Module:
    """Returns the module whose input is that of the decoder layer `index`."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return next(
        modules[index] for modules in model.modules() if isinstance(modules, nn.ModuleList) and len(modules) == count
    )
