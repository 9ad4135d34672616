"""Attention of prompts by the library `flash-attn-4` (the extra `cuda`) on Hopper and Blackwell GPUs.

It compiles a kernel for each kind of layer at its first use. It reads page tables on compute capability 9.x, 10.x and
11.x only. Sequences that decode use the engine's own kernel, which splits their keys into parts; on 9.x the library
does not do that.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention, Lengths
from tgi_server.engine.backends.attention.gather import GatherAttention

# The first number of the compute capabilities on which the library reads page tables.
_MAJORS = (9, 10, 11)
# Tokens of the test texts after the end of a window, and of those for layers without a window.
_BEHIND, _WITHOUT_WINDOW = 200, 4000
_DTYPES = (torch.bfloat16, torch.float16)


class FlashAttention(CudaAttention):
    """Computes prompts with the library; all else, and layers that it does not support, with the engine's kernels."""

    name = "flash-attn-4 and Triton"

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        major, _ = torch.cuda.get_device_capability()
        # beyond 128 elements, it takes 256 on all of these, and others on Hopper
        sizes = shape.head_dims or (shape.head_dim,)
        fits = all(size % 8 == 0 and (size <= 128 or size == 256 or (major == 9 and size < 256)) for size in sizes)
        return _is_installed() and major in _MAJORS and dtype in _DTYPES and fits and super().supports(shape, dtype)

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        causal = metadata.ends_of(variant) is None
        taken = variant.alibi_slopes is None and not variant.chunk and not self.kv_format.fp8 and causal
        if not metadata.chunks or not taken:
            return super().attend(layer, query, metadata, variant)
        from flash_attn.cute import flash_attn_varlen_func

        used = metadata.made("tokens of prompts", lambda: _tokens_of_prompts(metadata)) if metadata.decoding else None
        result = flash_attn_varlen_func(
            query,
            self._keys[variant.source(layer)],
            self._values[variant.source(layer)],
            cu_seqlens_q=metadata.query_starts,
            seqused_q=used,
            seqused_k=metadata.kv_lengths,
            max_seqlen_q=len(query),  # for a captured step, whose chunks may be of any length
            page_table=metadata.block_tables,
            softmax_scale=variant.scaling,
            causal=True,
            window_size=(variant.window - 1, 0) if variant.window else (None, None),
            learnable_sink=variant.sinks,
            softcap=variant.softcap,
        )
        output: Tensor = result[0] if isinstance(result, tuple) else result
        if metadata.decoding:
            self._attend_tiles(layer, query, metadata, variant, [(1, Lengths.ONE)], output)
        return output


def _is_installed() -> bool:
    """Returns True if the library is installed, not another one with a module of the same name."""
    try:
        return bool(version("flash-attn-4"))
    except PackageNotFoundError:
        return False


def _tokens_of_prompts(metadata: ForwardMetadata) -> Tensor:
    """Returns how many tokens of each sequence the library computes: none where the pass has only one."""
    lengths = metadata.query_starts.diff()
    return torch.where(lengths > 1, lengths, 0).int()


def fault_of(attention: FlashAttention, windows: Iterable[int]) -> str | None:
    """Compares the library with plain torch on texts longer than each window, and on a long text without a window.

    The texts with which models are checked are too short for this. Returns why the library must not be used; None if
    its results are right.
    """
    shape, device, dtype = attention.shape, attention.device, attention.dtype
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    one_layer = type(attention)(KVShape((max(shape.heads),), shape.head_dim), device, dtype)
    heads, size = 2 * max(shape.heads), one_layer.block_size

    def cases() -> Iterator[proofs.Case]:
        for window in sorted({0, *windows}):
            length = (window or _WITHOUT_WINDOW) + _BEHIND
            blocks = -(-length // size)
            one_layer.allocate(blocks + 1)
            for cache in (one_layer._keys[0], one_layer._values[0]):
                cache.copy_(random(*cache.shape))
            metadata = _of_a_row_and_a_chunk(length, blocks, device)
            variant = AttentionVariant(shape.head_dim**-0.5, window=window)
            query = random(1 + _BEHIND, heads, shape.head_dim)
            actual, wanted = (
                kind.attend(one_layer, 0, query, metadata, variant) for kind in (type(one_layer), GatherAttention)
            )
            yield f"in a window of {window or 'all'} tokens", actual, wanted

    return proofs.fault_of("flash-attn-4", cases, measure=proofs.row_error)


def _of_a_row_and_a_chunk(length: int, blocks: int, device: torch.device) -> ForwardMetadata:
    """Returns the metadata of a sequence that decodes and of the last tokens of a prompt, both of this length."""
    table = torch.arange(1, blocks + 1, dtype=torch.int32, device=device)
    return ForwardMetadata(
        slots=torch.zeros(1 + _BEHIND, dtype=torch.int64, device=device),
        block_tables=torch.stack([table, table.flip(0)]),
        kv_lengths=torch.tensor([length, length], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 1, 1 + _BEHIND], dtype=torch.int32, device=device),
        decoding=1,
        chunks=[ChunkSpan(1, _BEHIND, length)],
        max_kv_length=length,
    )
