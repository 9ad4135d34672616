"""Medusa: additional heads, each of which guesses the token one position further ahead.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024. Their trees of
guesses are not followed: each head gives the token that it finds the likeliest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from tgi_server.engine.checkpoint.quantized.layer import plain_linear
from tgi_server.engine.checkpoint.reader import read_tensors
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.memory import to_device
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.runners.hidden_states import HiddenStates
from tgi_server.engine.sampling import argmax
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.costs import Line, measure_rows
from tgi_server.engine.speculation.drafters import StateDrafter
from tgi_server.engine.speculation.last_pass import LastPass

WEIGHTS = "medusa_lm_head.safetensors"


class MedusaHead(nn.Module):
    """Residual blocks, x + silu(W x + b) each, and a projection to the vocabulary."""

    def __init__(self, blocks: Sequence[nn.Linear], output: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, [rows, vocab_size]. x: [rows, hidden_size]."""
        for block in self.blocks:
            x = x + silu(block(x))
        logits: Tensor = self.output(x)
        return logits


class Medusa(StateDrafter):
    """Proposes the guesses of the heads, which read the hidden state from which the last token was chosen."""

    def __init__(self, heads: nn.ModuleList, states: HiddenStates, hidden: Tensor) -> None:
        """hidden: [rows, hidden_size], of any content; for measuring."""
        self.default_most = len(heads)
        self._heads = heads
        self._states = states
        self._hidden = hidden
        self._last: LastPass | None = None
        self._costs: Line | None = None

    def warm_up(self, capacity: CacheCapacity, group: ShardGroup | None) -> None:
        self._last = None
        self._costs = measure_rows(lambda rows: self._guesses(self._hidden[:rows], 1), len(self._hidden), group)

    def seconds(self, tokens: int, sequences: int) -> float:
        return tokens * self._costs(sequences) if self._costs else 0.0

    def follow(self, last: LastPass) -> None:
        self._last = last

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        places = {sequence: self._last.row_of(sequence) for sequence in room if self._last and room[sequence] > 0}
        rows = {sequence: row for sequence, row in places.items() if row is not None}
        if not rows:
            return {}
        assert self._states.head is not None
        hidden = self._states.head.index_select(0, to_device([*rows.values()], torch.int64, self._states.head.device))
        guesses = self._guesses(hidden, max(room.values())).tolist()
        return {sequence: guess[: room[sequence]] for sequence, guess in zip(rows, guesses, strict=True)}

    def _guesses(self, hidden: Tensor, tokens: int) -> Tensor:
        """Returns the likeliest next tokens but one, but two and so on, [rows, tokens]. hidden: [rows, hidden_size]."""
        return torch.stack([argmax(head(hidden)) for head in self._heads[:tokens]], dim=1)


def read_heads(folder: Path, settings: Mapping[str, Any], model: PreTrainedModel) -> nn.ModuleList:
    """Returns the heads in a folder of TGI's format, on the model's device. Heads without an output have the model's.

    settings: the folder's config.json. Raises InvalidWeights or UnsupportedModel.
    """
    count, depth = int(settings["medusa_num_heads"]), int(settings.get("medusa_num_layers", 1))
    try:
        weights = read_tensors(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise InvalidWeights(f"{folder / WEIGHTS} cannot be read: {error}") from error
    own = model.get_output_embeddings()
    heads = nn.ModuleList()
    try:
        for head in range(count):
            blocks = [
                _linear(weights[f"{head}.{block}.linear.weight"], weights[f"{head}.{block}.linear.bias"], model)
                for block in range(depth)
            ]
            output = weights.get(f"{head}.{depth}.weight")
            heads.append(MedusaHead(blocks, own if output is None else _linear(output, None, model)))
    except KeyError as error:
        raise InvalidWeights(f"{folder / WEIGHTS} has no weight {error.args[0]!r}") from error
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    for name, weight in weights.items():
        if weight.shape[-1] != hidden_size or (weight.dim() == 2 and weight.shape[0] not in (hidden_size, vocab_size)):
            raise UnsupportedModel(
                f"{folder / WEIGHTS}: {name} has the shape {list(weight.shape)}, but the model has a hidden size of "
                f"{hidden_size} and {vocab_size} tokens; name the model that the heads were made for"
            )
    return heads


def _linear(weight: Tensor, bias: Tensor | None, model: PreTrainedModel) -> nn.Linear:
    device, dtype = model.device, model.dtype
    return plain_linear(weight.to(device, dtype), None if bias is None else bias.to(device, dtype))
