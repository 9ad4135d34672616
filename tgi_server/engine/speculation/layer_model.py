"""A decoder layer that drafts from the hidden states of a model, as EAGLE-3 and multi-token prediction do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.backends import PagedModel, PassInput
from tgi_server.engine.backends.base import ImageTokens


class LayerModel(PagedModel):
    """Gives a layer the hidden states that a model has of each token's predecessor.

    For tokens that the model has not computed yet, the layer's own output stands for these.

    features: [tokens, size] of those tokens of the next pass that do not decode; None: zeros. carried: [rows,
    hidden_size]; the layer's output for each row, which is its input in the next pass.
    """

    def __init__(
        self,
        layer: PagedModel,
        size: int,
        project: Callable[[Tensor], Tensor],
        join: Callable[[Tensor, Tensor], Tensor] = lambda _, hidden: hidden,
        *,
        normed: bool,
    ) -> None:
        """layer: a model with one layer. size: number of a token's features. project: maps features to hidden states.
        join: makes the layer's input from tokens, [tokens] int64, and hidden states, [tokens, hidden_size]. normed:
        True if the output of the last norm is carried to the next token, not its input.
        """
        super().__init__(layer.source, layer.attention)
        self.features: Tensor | None = None
        self._layer = layer
        self._size = size
        self._project = project
        self._join = join
        self._normed = normed
        self._wanted: Tensor | None = None
        source: Any = layer.source
        self.carried = torch.empty(
            0, source.config.hidden_size, device=self.attention.device, dtype=self.attention.dtype
        )
        layer.tap([] if normed else [1], self._carry)

    def hold(self, rows: int) -> None:
        """Allocates the hidden states that rows carry from one pass to the next."""
        self.carried = self.carried.new_zeros(rows, self.carried.shape[1])

    def allocate(self, num_blocks: int) -> None:
        self._layer.allocate(num_blocks)

    def forward(self, inputs: PassInput) -> Tensor:
        hidden = self._join(inputs.tokens, self._before(len(inputs.tokens), inputs.metadata.decoding))
        rows = torch.arange(len(hidden), device=hidden.device)
        self._wanted = inputs.wanted
        return self._layer.forward(replace(inputs, adapters=None, images=ImageTokens(rows, hidden, ())))

    def _before(self, tokens: int, decoding: int) -> Tensor:
        """Returns what the rows that decode carry, and then hidden states: [tokens, hidden_size]."""
        if decoding == tokens:
            return self.carried[:decoding]
        features, self.features = self.features, None
        if features is None:
            features = self.carried.new_zeros(tokens - decoding, self._size)
        return torch.cat([self.carried[:decoding], self._project(features)])

    def _carry(self, states: Sequence[Tensor]) -> None:
        output = states[0]
        if not self._normed:
            output = states[1] if self._wanted is None else states[1][self._wanted]
        rows = min(len(output), len(self.carried))
        self.carried[:rows] = output[:rows]
