"""Attention on CUDA by the flash-attention kernel that torch carries, straight from the KV blocks."""

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tgi_server.engine.attention.base import AttentionVariant, KVShape, Step
from tgi_server.engine.attention.gather import GatherAttention

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


class VarlenAttention(GatherAttention):
    """`torch.nn.attention.varlen.varlen_attn` with a block table; see its documentation for shapes.

    The kernel takes pages of a multiple of 256 tokens. It knows neither soft-capping nor biases: layers that need
    them attend in plain torch.
    """

    block_size = 256

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        fits = shape.head_dim <= MAX_HEAD_DIM and shape.head_dim % HEAD_DIM_STEP == 0
        return fits and dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability() >= (8, 0)

    def attend(self, layer: int, query: Tensor, step: Step, variant: AttentionVariant) -> Tensor:
        if variant.softcap or variant.alibi_slopes is not None:
            return super().attend(layer, query, step, variant)
        output = varlen_attn(
            query.contiguous(),
            self._keys[layer],
            self._values[layer],
            cu_seq_q=step.query_starts,
            cu_seq_k=None,
            max_q=max((chunk.length for chunk in step.chunks), default=1),
            max_k=step.max_kv_length,
            scale=variant.scaling,
            window_size=(variant.window - 1 if variant.window else -1, 0),
            enable_gqa=query.shape[1] != self._keys[layer].shape[2],
            seqused_k=step.kv_lengths,
            block_table=step.block_tables,
        )
        assert isinstance(output, Tensor)  # a pair only when auxiliary outputs are asked for
        return output
