"""The seam between `transformers` model code and the paged KV cache.

A model that goes through `AttentionInterface` calls, in each layer, first `cache.update(key, value, layer)` and then
the attention function. Here the first writes the keys and values into KV blocks and the second attends over them, so
the model code between the two never sees history. The attention function finds its cache as an attribute of the
attention module that calls it: there is no global state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from tgi_server.engine.attention.base import AttentionBackend, AttentionVariant, ForwardMetadata
from tgi_server.engine.errors import InvalidCall, UnsupportedModel
from tgi_server.engine.memory import to_device

IMPLEMENTATION = "oatmill_paged"


class PagedCache(Cache):
    """Stands where `transformers` expects a cache; holds no keys itself.

    backend: owns the KV blocks. metadata: where the tokens of the current forward pass stand; set before each pass.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(layers=[])
        self.backend = backend
        self.metadata: ForwardMetadata | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """key and value: [1, kv_heads, tokens, head_dim]; returned as they came."""
        assert self.metadata is not None
        self.backend.write(layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1), self.metadata)
        return key, value

    def attend(self, layer: int, query: Tensor, variant: AttentionVariant) -> Tensor:
        """query: [1, heads, tokens, head_dim]. Returns [1, tokens, heads, head_dim]."""
        assert self.metadata is not None
        return self.backend.attend(layer, query[0].transpose(0, 1), self.metadata, variant).unsqueeze(0)

    def attach(self, model: nn.Module) -> None:
        """Makes this the cache that the model's attention modules find."""
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.paged_cache = self

    def get_seq_length(self, layer_idx: int = 0, *_: Any, **__: Any) -> int:
        """The model is told positions; to it every pass looks like a first one."""
        return 0


class BlockTables:
    """table: [rows, blocks] int32. Entries past a row's last block are 0, the scratch block; so is the whole of a row
    that no sequence has.

    What is added between two passes goes to the device in one copy: read `table` after `flush`.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self.table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._added: tuple[list[int], list[int]] = ([], [])  # places in the flattened table, and blocks

    def extend(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """The row's entries from `first` on are these blocks. Raises InvalidCall for more than a sequence may have."""
        if first + len(blocks) > self.table.shape[1]:
            raise InvalidCall(f"{first + len(blocks)} blocks for a sequence; at most {self.table.shape[1]} are of use")
        place = row * self.table.shape[1] + first
        self._added[0].extend(range(place, place + len(blocks)))
        self._added[1].extend(blocks)

    def move(self, source: int, target: int) -> None:
        self.flush()
        self.table[target] = self.table[source]

    def clear(self, first: int, last: int) -> None:
        """Rows `first` .. `last` - 1 have no sequence any more."""
        self.flush()
        self.table[first:last].zero_()

    def flush(self) -> Tensor:
        """Returns the table."""
        places, blocks = self._added
        if places:
            added = to_device(places + blocks, torch.int64, self.table.device).view(2, -1)
            self.table.view(-1).index_copy_(0, added[0], added[1].to(torch.int32))
            self._added = ([], [])
        return self.table


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that `transformers` models call; see `AttentionInterface`.

    Raises UnsupportedModel for arguments that would change the result and are not known here.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedModel("attention sinks and position biases are not supported on the paged path")
    variant = AttentionVariant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    cache: PagedCache = module.paged_cache  # type: ignore[assignment]
    return cache.attend(int(module.layer_idx), query, variant), None  # type: ignore[arg-type]


AttentionInterface.register(IMPLEMENTATION, paged_attention)
