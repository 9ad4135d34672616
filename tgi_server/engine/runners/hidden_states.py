"""Hidden states of the last forward pass, for drafters that read them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from tgi_server.engine.runners.graphs import Capture

T = TypeVar("T")


class HiddenStates:
    """Holds the inputs of a model's head and of some of its layers, which it taps. The next pass overwrites them.

    head: [rows, hidden_size]; the hidden states from which the logits of the last pass were computed, in their order.
    layers: [tokens, hidden_size] each; the inputs of the requested layers, in ascending order.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        """layers: indices of decoder layers."""
        self.head: Tensor | None = None
        self.layers: list[Tensor] = []
        self.indices = sorted(layers)

    def capturing(self, capture: Capture) -> Capture:
        """Returns a capture of steps that, when they run again, leave the captured tensors as they left them before."""

        def captured(step: Callable[[], T]) -> Callable[[], T]:
            replay = capture(step)
            head, layers = self.head, list(self.layers)

            def run() -> T:
                self.head, self.layers = head, layers
                return replay()

            return run

        return captured

    def keep(self, inputs: Sequence[Tensor]) -> None:
        """Takes the head's input, and then those of the layers in ascending order."""
        self.head, self.layers = inputs[0], list(inputs[1:])

    def select(self, rows: Tensor) -> None:
        """Keeps some rows of a pass whose tokens all had logits, in this order. rows: [rows] int64."""
        assert self.head is not None
        self.head = self.head.index_select(0, rows)
        self.layers = [states.index_select(0, rows) for states in self.layers]
