"""The engine's GPU kernels. The modules of this folder import Triton; this one, which their callers need, does not."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tokens of a pass that kernels attend for together: neighbours in one sequence. Each field is [tiles] int32.

    first: index of a tile's first token among the pass's. counts: its tokens; 0: nothing is attended.
    kv_lengths: keys that its last token sees, its own included. sequences: its row of the block tables.
    """

    first: Tensor
    counts: Tensor
    kv_lengths: Tensor
    sequences: Tensor
