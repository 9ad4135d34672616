"""Every backend against attention computed sequence by sequence from the whole history, in float32."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tgi_server.engine.attention import gather
from tgi_server.engine.attention.base import AttentionBackend, AttentionVariant, ChunkSpan, ForwardMetadata, KVShape
from tgi_server.engine.attention.cpu import CpuAttention
from tgi_server.engine.attention.gather import GatherAttention

HEAD_DIM = 32
BACKENDS = [GatherAttention, CpuAttention]


def history(length: int, kv_heads: int, seed: int, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, length, kv_heads, head_dim, generator=generator)
    return key, value


def expected(query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> Tensor:
    """query: [queries, heads, head_dim], the last of the history's positions."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * variant.scaling
    if variant.softcap:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    positions = torch.arange(len(key) - len(query), len(key))
    distance = positions[:, None] - torch.arange(len(key))[None]
    if variant.rounded_alibi:
        bias = variant.alibi_slopes.bfloat16()[:, None] * torch.arange(len(key)).bfloat16()
        scores = scores + bias[:, None].float() * variant.scaling
    elif variant.alibi_slopes is not None:
        scores = scores - variant.alibi_slopes[:, None, None] * distance
    hidden = distance < 0
    if variant.window:
        hidden |= distance >= variant.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


def create(backend: type[AttentionBackend], kv_heads: int, dtype: torch.dtype = torch.float32) -> AttentionBackend:
    shape = KVShape((kv_heads,), HEAD_DIM)
    assert backend.supports(shape, dtype)
    return backend(shape, torch.device("cpu"), dtype)


def run(
    backend: AttentionBackend, heads: int, kv_heads: int, decodes: list[int], prompts: list[tuple[int, int]], variant
) -> tuple[Tensor, Tensor]:
    """decodes: tokens of each decoding sequence. prompts: (tokens before, tokens of the chunk).

    Returns what the backend computes and what it should.
    """
    size, head_dim = backend.block_size, backend.shape.head_dim
    spans = [(length - 1, 1) for length in decodes] + prompts
    blocks_of = [-(-(before + count) // size) for before, count in spans]
    permutation = (torch.randperm(sum(blocks_of), generator=torch.Generator().manual_seed(1)) + 1).split(blocks_of)
    backend.allocate(sum(blocks_of) + 1)
    tables = torch.zeros(len(spans), max(blocks_of) + 1, dtype=torch.int32)
    queries, outcomes, slots, starts, chunks = [], [], [], [0], []
    for index, ((before, count), blocks) in enumerate(zip(spans, permutation, strict=True)):
        total = before + count
        tables[index, : len(blocks)] = blocks
        key, value = history(total, kv_heads, seed=index, head_dim=head_dim)
        places = torch.arange(total)
        slot = blocks[places // size] * size + places % size
        empty = torch.zeros(0)
        whole = ForwardMetadata(slot.to(backend.device), tables, empty, empty, 0, [], 0)
        backend.write(0, *(part.to(backend.device, backend.dtype) for part in (key, value)), whole)
        query = torch.randn(count, heads, head_dim, generator=torch.Generator().manual_seed(100 + index))
        if index >= len(decodes):
            chunks.append(ChunkSpan(starts[-1], count, total))
        queries.append(query)
        outcomes.append(expected(query, key, value, variant))
        slots.append(slot[before:])
        starts.append(starts[-1] + count)
    device = backend.device
    metadata = ForwardMetadata(
        slots=torch.cat(slots).to(device),
        block_tables=tables.to(device),
        kv_lengths=torch.tensor([before + count for before, count in spans], dtype=torch.int32, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        decoding=len(decodes),
        chunks=chunks,
        max_kv_length=max(before + count for before, count in spans),
    )
    query = torch.cat(queries).to(device, backend.dtype)
    slopes = variant.alibi_slopes
    there = replace(variant, alibi_slopes=None if slopes is None else slopes.to(device))
    return backend.attend(0, query, metadata, there).float().cpu(), torch.cat(outcomes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (16, 1), (71, 1)])
@pytest.mark.parametrize("kind", ["plain", "window", "wide window", "softcap", "alibi", "rounded alibi"])
def test_backend_equals_attention_over_the_whole_history(backend, heads, kv_heads, kind) -> None:
    variant = {
        "plain": AttentionVariant(0.2),
        "window": AttentionVariant(0.2, window=5),
        "wide window": AttentionVariant(0.2, window=20),
        "softcap": AttentionVariant(0.2, softcap=3.0),
        "alibi": AttentionVariant(0.2, alibi_slopes=torch.linspace(0.02, 0.6, heads)),
        "rounded alibi": AttentionVariant(
            0.2, alibi_slopes=torch.linspace(0.02, 0.6, heads).bfloat16().float(), rounded_alibi=True
        ),
    }[kind]
    instance = create(backend, kv_heads)
    actual, wanted = run(instance, heads, kv_heads, [1, 7, 33, 100], [(0, 1), (0, 50), (40, 37), (96, 3)], variant)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 5000])
@pytest.mark.parametrize(
    "variant", [AttentionVariant(0.2), AttentionVariant(0.2, softcap=3.0)], ids=["plain", "softcap"]
)
def test_long_histories_are_attended_piece_by_piece(variant, elements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_ELEMENTS_AT_ONCE", elements)
    instance = create(GatherAttention, 2)
    actual, wanted = run(instance, 4, 2, [1, 7, 33, 100], [(0, 50), (40, 37)], variant)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_exact_as_their_inputs(backend, dtype) -> None:
    instance = create(backend, 2, dtype)
    actual, wanted = run(instance, 4, 2, [5, 64], [(0, 70), (31, 2)], AttentionVariant(0.2))
    torch.testing.assert_close(actual, wanted, rtol=3e-2, atol=3e-2)


class DirtyAttention(CpuAttention):
    """A cache in which other sequences have left what is no number."""

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        for cache in (*self.keys, *self.values):
            cache.fill_(math.nan)


@pytest.mark.parametrize("head_dim", [32, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kernel_for_prompts_is_as_exact_as_its_inputs(dtype, head_dim) -> None:
    instance = DirtyAttention(KVShape((2,), head_dim), torch.device("cpu"), dtype)
    kernels = instance.prompt_kernels
    assert kernels[-1] == ("amx_emulated" if dtype is torch.bfloat16 and head_dim % 32 == 0 else "vectors")
    exact = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for name in kernels:
        instance.prompt_kernel = name
        for variant in (AttentionVariant(0.2), AttentionVariant(0.2, window=70), AttentionVariant(0.2, softcap=3.0)):
            prompts = [(0, 1), (0, 9), (0, 300), (31, 33), (126, 40), (200, 31)]
            actual, wanted = run(instance, 6, 2, [130], prompts, variant)
            torch.testing.assert_close(actual, wanted, **exact, msg=lambda text, name=name: f"{name}: {text}")


def test_a_kernel_that_this_cpu_has_not_is_refused() -> None:
    instance = create(CpuAttention, 2)
    instance.prompt_kernel = "magic"
    with pytest.raises(RuntimeError, match="no kernel `magic` for prompts"):
        run(instance, 4, 2, [], [(0, 70)], AttentionVariant(0.2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copied_block_serves_as_the_original(backend) -> None:
    instance = create(backend, 2)
    instance.allocate(4)
    key, value = history(10, 2, seed=3)
    slots = 2 * instance.block_size + torch.arange(10)
    empty = torch.zeros(0)
    instance.write(0, key, value, ForwardMetadata(slots, empty, empty, empty, 0, [], 0))
    instance.copy(source=2, target=3, tokens=10)
    query = torch.randn(1, 4, HEAD_DIM)
    outputs = [
        instance.attend(
            0,
            query,
            ForwardMetadata(
                slots[9:],
                torch.tensor([[block]], dtype=torch.int32),
                torch.tensor([10], dtype=torch.int32),
                torch.tensor([0, 1], dtype=torch.int32),
                1,
                [],
                10,
            ),
            AttentionVariant(0.3),
        )
        for block in (2, 3)
    ]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], expected(query, key, value, AttentionVariant(0.3)), rtol=1e-4, atol=1e-5)
