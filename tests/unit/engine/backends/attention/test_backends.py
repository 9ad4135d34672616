"""Every backend against attention computed sequence by sequence from the whole history, in float32."""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tgi_server.engine.backends.attention import pieces
from tgi_server.engine.backends.attention.base import (
    AttentionBackend,
    AttentionVariant,
    ChunkSpan,
    ForwardMetadata,
    KVShape,
    Latents,
)
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.checkpoint.quantized.kv_scales import KVScales
from tgi_server.engine.memory import HOST

HEAD_DIM = 32
BACKENDS = [GatherAttention, CpuAttention]
KINDS = [
    "plain",
    "window",
    "wide window",
    "chunks",
    "softcap",
    "alibi",
    "rounded alibi",
    "sinks",
    "window, softcap, sinks",
]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def history(length: int, kv_heads: int, seed: int, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, length, kv_heads, head_dim, generator=generator)
    return key, value


def expected(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, ends: Tensor | None = None
) -> Tensor:
    """query: [queries, heads, head_dim], the last of the history's positions.

    ends: [queries], behind the last position that each looks at; None: its own.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * variant.scaling
    if variant.softcap:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    positions = torch.arange(len(key) - len(query), len(key))
    distance = positions[:, None] - torch.arange(len(key))[None]
    if variant.rounded_alibi and variant.alibi_slopes is not None:
        bias = variant.alibi_slopes.bfloat16()[:, None] * torch.arange(len(key)).bfloat16()
        scores = scores + bias[:, None].float() * variant.scaling
    elif variant.alibi_slopes is not None:
        scores = scores - variant.alibi_slopes[:, None, None] * distance
    hidden = distance < 0 if ends is None else torch.arange(len(key)) >= ends[:, None]
    if variant.window:
        hidden |= distance >= variant.window
    if variant.chunk:
        hidden |= (positions // variant.chunk)[:, None] != torch.arange(len(key)) // variant.chunk
    scores = scores.masked_fill(hidden, -math.inf)
    if variant.sinks is not None:
        scores = torch.cat([scores, variant.sinks[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


class CountedCopies(TorchDispatchMode):
    """Counts the operations that copy a tensor's elements."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
        return func(*args, **(kwargs or {}))


def create(
    backend: type[AttentionBackend],
    kv_heads: int,
    dtype: torch.dtype = torch.float32,
    kv_format: KVFormat | None = None,
    head_dim: int = HEAD_DIM,
) -> AttentionBackend:
    shape = KVShape((kv_heads,), head_dim)
    assert backend.supports(shape, dtype)
    return backend(shape, torch.device("cpu"), dtype, kv_format)


def fp8(dtype: torch.dtype, key_dtype: torch.dtype | None = None) -> KVFormat:
    """Keys and values of the tests are of the size of 1, so that a good part of these is too large, or subnormal."""
    return KVFormat(dtype, {0: KVScales(keys=0.004, values=30.0)}, key_dtype)


def kept(backend: AttentionBackend, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values as the numbers in the cache stand for them."""

    def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        if dtype.itemsize > 1:
            return x
        most = torch.finfo(dtype).max
        return (x.to(backend.dtype).float() / scale).clamp(-most, most).to(dtype).float() * scale

    stored, scales = backend.kv_format, backend.kv_format.of(0)
    return rounded(key, scales.keys, stored.keys), rounded(value, scales.values, stored.dtype)


def run(
    backend: AttentionBackend,
    heads: int,
    kv_heads: int,
    decodes: list[int],
    prompts: list[tuple[int, int]],
    variant: AttentionVariant,
    images: list[tuple[int, int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """decodes: tokens of each decoding sequence. prompts: (tokens before, tokens of the chunk). images: positions of
    prompts, the first and the end, whose tokens look at each other.

    Returns what the backend computes and what it should.
    """
    size, head_dim = backend.block_size, backend.shape.head_dim
    spans = [(length - 1, 1) for length in decodes] + prompts
    blocks_of = [-(-(before + count) // size) for before, count in spans]
    permutation = (torch.randperm(sum(blocks_of), generator=torch.Generator().manual_seed(1)) + 1).split(blocks_of)
    backend.allocate(sum(blocks_of) + 1)
    tables = torch.zeros(len(spans), max(blocks_of) + 1, dtype=torch.int32)
    queries, outcomes, slots, starts, chunks, all_ends = [], [], [], [0], [], []
    for index, ((before, count), blocks) in enumerate(zip(spans, permutation, strict=True)):
        total = before + count
        tables[index, : len(blocks)] = blocks
        key, value = history(total, kv_heads, seed=index, head_dim=head_dim)
        places = torch.arange(total)
        slot = blocks[places // size] * size + places % size
        empty = torch.zeros(0)
        whole = ForwardMetadata(slot.to(backend.device), tables, empty, empty, 0, [], 0)
        key_there, value_there = (part.to(backend.device, backend.dtype) for part in (key, value))
        backend.write(0, key_there, value_there, whole)
        query = torch.randn(count, heads, head_dim, generator=torch.Generator().manual_seed(100 + index))
        if index >= len(decodes):
            chunks.append(ChunkSpan(starts[-1], count, total))
        ends = torch.arange(before + 1, total + 1, dtype=torch.int32)
        for first, end in (images or ()) if index >= len(decodes) else ():
            if end <= total:
                ends[max(0, first - before) : max(0, end - before)] = end
        all_ends.append(ends)
        queries.append(query)
        outcomes.append(expected(query, *kept(backend, key, value), variant, ends))
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
        ends=None if images is None else torch.cat(all_ends).to(device),
    )
    query = torch.cat(queries).to(device, backend.dtype)
    slopes, sinks = (None if each is None else each.to(device) for each in (variant.alibi_slopes, variant.sinks))
    there = replace(variant, alibi_slopes=slopes, sinks=sinks)
    return backend.attend(0, query, metadata, there).float().cpu(), torch.cat(outcomes)


def run_latents(
    backend: AttentionBackend, heads: int, lengths: list[int], row_tokens: int = 1, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """Attends over latents: rows that decode, of these lengths, and a prompt's chunk, if it has tokens.

    Returns what the backend computes, and what plain torch does in float32 on a CPU.
    """
    rank, rotated, size = backend.shape.head_dim, backend.shape.value_dim or 0, 16
    numbers = torch.Generator().manual_seed(1)
    totals = [*lengths, *([300 + chunk] if chunk else [])]
    blocks_of = [-(-total // backend.block_size) for total in totals]
    tables = torch.zeros(len(totals), max(blocks_of) + 1, dtype=torch.int32)
    permutation = (torch.randperm(sum(blocks_of), generator=numbers) + 1).int()
    for table, blocks in zip(tables, permutation.split(blocks_of), strict=True):
        table[: len(blocks)] = blocks
    counts = [row_tokens] * len(lengths) + [chunk] * bool(chunk)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    slots = torch.arange(backend.block_size * (sum(blocks_of) + 1))
    queries = torch.randn(sum(counts), heads, size + rotated, generator=numbers)
    cached = [torch.randn(len(slots), 1, elements, generator=numbers) for elements in (rank, rotated)]
    weights = [torch.randn(heads, *shape, generator=numbers) / 8 for shape in ((size, rank), (rank, 24))]
    plain = GatherAttention(backend.shape, HOST, torch.float32)
    plain.block_size = backend.block_size
    outputs = []
    for each in (backend, plain):
        tensors = (x.to(backend.dtype).to(each.device, each.dtype) for x in (queries, *cached, *weights))
        query, key, value, *made = tensors
        metadata = ForwardMetadata(
            slots=slots.to(each.device),
            block_tables=tables.to(each.device),
            kv_lengths=torch.tensor(totals, dtype=torch.int32, device=each.device),
            query_starts=starts.to(each.device),
            decoding=len(lengths),
            chunks=[ChunkSpan(row_tokens * len(lengths), chunk, totals[-1])] if chunk else [],
            max_kv_length=max(totals),
            row_tokens=row_tokens,
        )
        each.allocate(sum(blocks_of) + 1)
        each.write(0, key, value, metadata)
        outputs.append(each.attend(0, query, metadata, AttentionVariant(0.1, latents=Latents(*made))).float().cpu())
    return outputs[0], outputs[1]


def make_variant(kind: str, heads: int) -> AttentionVariant:
    sinks = torch.linspace(-4, 12, heads)  # below all scores, and above them
    return {
        "plain": AttentionVariant(0.2),
        "window": AttentionVariant(0.2, window=5),
        "wide window": AttentionVariant(0.2, window=20),
        "chunks": AttentionVariant(0.2, chunk=20),
        "softcap": AttentionVariant(0.2, softcap=3.0),
        "alibi": AttentionVariant(0.2, alibi_slopes=torch.linspace(0.02, 0.6, heads)),
        "rounded alibi": AttentionVariant(
            0.2, alibi_slopes=torch.linspace(0.02, 0.6, heads).bfloat16().float(), rounded_alibi=True
        ),
        "sinks": AttentionVariant(0.2, sinks=sinks),
        "window, softcap, sinks": AttentionVariant(0.2, window=20, softcap=3.0, sinks=sinks),
    }[kind]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (16, 1), (71, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_backend_equals_attention_over_the_whole_history(backend, heads, kv_heads, kind) -> None:
    variant = make_variant(kind, heads)
    instance = create(backend, kv_heads)
    actual, wanted = run(instance, heads, kv_heads, [1, 7, 33, 100], [(0, 1), (0, 50), (40, 37), (96, 3)], variant)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "window", "wide window", "softcap"])
def test_tokens_of_an_image_look_at_each_other(backend, dtype, kind) -> None:
    """Images lie within a block, over several, and begin before the chunk."""
    instance = create(backend, 2, dtype)
    prompts, images = [(0, 200), (40, 37), (0, 9), (10, 3), (150, 90)], [(2, 8), (33, 45), (60, 77), (130, 200)]
    actual, wanted = run(instance, 6, 2, [7, 100], prompts, make_variant(kind, 6), images)
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (3e-2, 3e-2)
    torch.testing.assert_close(actual, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("elements", [1, 5000])
@pytest.mark.parametrize(
    "variant",
    [AttentionVariant(0.2), AttentionVariant(0.2, softcap=3.0), AttentionVariant(0.2, sinks=torch.ones(4))],
    ids=["plain", "softcap", "sinks"],
)
def test_long_histories_are_attended_piece_by_piece(variant, elements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_ELEMENTS_AT_ONCE", elements)
    instance = create(GatherAttention, 2)
    actual, wanted = run(instance, 4, 2, [1, 7, 33, 100], [(0, 50), (40, 37)], variant)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_exact_as_their_inputs(backend, dtype) -> None:
    instance = create(backend, 2, dtype)
    actual, wanted = run(instance, 4, 2, [5, 64], [(0, 70), (31, 2)], AttentionVariant(0.2))
    torch.testing.assert_close(actual, wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cached", FP8)
@pytest.mark.parametrize("keys_too", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_in_8_bits_is_attended_as_what_its_numbers_stand_for(backend, cached, dtype, keys_too) -> None:
    instance = create(backend, 2, dtype, fp8(cached, None if keys_too else dtype))
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (6e-2, 6e-2)
    slopes = torch.linspace(0.02, 0.6, 6).bfloat16().float()
    for variant in (
        AttentionVariant(0.2),
        AttentionVariant(0.2, window=70, softcap=3.0),
        AttentionVariant(0.2, alibi_slopes=slopes, rounded_alibi=True),
    ):
        actual, wanted = run(instance, 6, 2, [1, 7, 130], [(0, 1), (0, 50), (126, 40)], variant)
        torch.testing.assert_close(actual, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("cached", FP8)
@pytest.mark.parametrize("keys", [None, torch.bfloat16])
def test_prompts_read_a_cache_in_8_bits(cached, keys) -> None:
    instance = CpuAttention(KVShape((2,), 64), torch.device("cpu"), torch.bfloat16, fp8(cached, keys))
    actual, wanted = run(instance, 6, 2, [130], [(0, 300), (31, 33), (200, 31)], AttentionVariant(0.2, window=70))
    torch.testing.assert_close(actual, wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cached", FP8)
def test_numbers_in_8_bits_are_the_nearest_ones(backend, cached) -> None:
    """Asked by way of attention over one token, which is its value."""
    every = torch.arange(256, dtype=torch.uint8).view(cached).float()
    between = every[every.isfinite()].sort().values
    numbers = torch.cat([between, (between[1:] + between[:-1]) / 2, torch.tensor([1e-9, -1e-9, 1e30, -1e30])])
    wanted = numbers.clamp(between[0], between[-1]).to(cached).float()
    value = torch.zeros(-(-len(numbers) // 64) * 64)
    value[: len(numbers)] = numbers
    instance = create(backend, 1, kv_format=KVFormat(cached), head_dim=64)
    instance.allocate(2)
    outputs = []
    for row in value.view(-1, 1, 1, 64):
        slots = torch.tensor([instance.block_size])
        table, one = torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        metadata = ForwardMetadata(slots, table, one, torch.tensor([0, 1], dtype=torch.int32), 1, [], 1)
        instance.write(0, row, row, metadata)
        outputs.append(instance.attend(0, torch.zeros(1, 1, 64), metadata, AttentionVariant(1.0)).flatten())
    torch.testing.assert_close(torch.cat(outputs)[: len(numbers)], wanted, rtol=1e-6, atol=0)


def attended(backend: AttentionBackend, key: Tensor, value: Tensor, query: Tensor, parts: list[int], variant) -> Tensor:
    """Returns what each query gets, [tokens, heads, head_dim], where they are computed in parts of so many tokens."""
    size, tokens = backend.block_size, len(query)
    tables = torch.arange(1, tokens // size + 3, dtype=torch.int32)[None]
    slots, outputs = torch.arange(tokens) + size, []
    for end, count in zip(accumulate(parts), parts, strict=True):
        own = slice(end - count, end)
        lengths, starts = torch.tensor([end], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
        metadata = ForwardMetadata(slots[own], tables, lengths, starts, 0, [ChunkSpan(0, count, end)], end)
        backend.write(0, key[own], value[own], metadata)
        outputs.append(backend.attend(0, query[own], metadata, variant))
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [None, *FP8])
@pytest.mark.parametrize("keys_too", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_query_has_the_same_bits_however_its_prompt_is_cut(dtype, keys_too, cached, kind) -> None:
    kv_format = fp8(cached, None if keys_too else dtype) if cached else None
    for heads, kv_heads, head_dim in ((4, 2, 64), (3, 3, 48), (8, 1, 32)):
        backend = create(CpuAttention, kv_heads, dtype, kv_format, head_dim)
        backend.allocate(14)
        key, value = (part.to(dtype) for part in history(300, kv_heads, 5, head_dim))
        query = (torch.randn(300, heads, head_dim, generator=torch.Generator().manual_seed(7)) * 4).to(dtype)
        variant = make_variant(kind, heads)
        whole = attended(backend, key, value, query, [300], variant)
        for parts in ([1] * 300, [127, 1, 1, 171], [33, 3, 2, 5, 4, 100, 153], [260, 40], [7] * 42 + [6]):
            assert torch.equal(attended(backend, key, value, query, parts, variant), whole), parts


class DirtyAttention(CpuAttention):
    """A cache in which other sequences have left what is no number."""

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        for cache in (*self.keys, *self.values):
            cache.fill_(math.nan)


@pytest.mark.parametrize("head_dim", [32, 80, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts_are_as_exact_as_their_inputs(dtype, head_dim) -> None:
    instance = DirtyAttention(KVShape((2,), head_dim), torch.device("cpu"), dtype)
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (3e-2, 3e-2)
    scaling = head_dim**-0.5
    for variant in (
        AttentionVariant(scaling),
        AttentionVariant(scaling, window=70),
        AttentionVariant(scaling, softcap=3.0),
        AttentionVariant(scaling, window=70, sinks=torch.linspace(-4, 12, 6)),
    ):
        prompts = [(0, 1), (0, 9), (0, 300), (31, 33), (126, 40), (200, 31)]
        actual, wanted = run(instance, 6, 2, [130], prompts, variant)
        torch.testing.assert_close(actual, wanted, rtol=rtol, atol=atol)


def test_threads_write_both_values_of_a_pair_wherever_they_stand_in_a_pass() -> None:
    """Drafted tokens come after all others in a pass, so another thread may write the other value of a pair."""
    own = torch.ops.oatmill.set_own_threads(3)
    slots = torch.cat([torch.arange(32, 32 * 41, 32), torch.arange(33, 32 * 41 + 1, 32)])
    backend = create(CpuAttention, 2, torch.bfloat16)
    assert isinstance(backend, CpuAttention)
    key, value = torch.randn(2, len(slots), 2, HEAD_DIM).bfloat16()
    metadata = ForwardMetadata(slots, torch.zeros(1, 1), torch.zeros(0), torch.zeros(0), 0, [], 0)
    for _ in range(200):
        backend.allocate(42)
        backend.write(0, key, value, metadata)
        pairs = backend.values[0].view(42, 2, 16, HEAD_DIM, 2)[1:41, :, 0]
        assert torch.equal(pairs[..., 0], value[:40])
        assert torch.equal(pairs[..., 1], value[40:])
    torch.ops.oatmill.set_own_threads(own)


@pytest.mark.parametrize("elements", [1, 5000, 1 << 27])
@pytest.mark.parametrize("cached", [None, *FP8])
def test_latents_are_attended_as_the_keys_and_values_made_of_them(
    cached, elements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of so many tokens that keys and values are made, and of fewer."""
    monkeypatch.setattr(pieces, "_ELEMENTS_AT_ONCE", elements)
    kv_format = KVFormat(cached, {0: KVScales(keys=0.02, values=0.03)}) if cached else None
    backend = GatherAttention(KVShape((1,), 8, value_dim=4), torch.device("cpu"), torch.float32, kv_format)
    backend.allocate(20)
    generator = torch.Generator().manual_seed(0)
    latent, rotated = torch.randn(120, 1, 8, generator=generator), torch.randn(120, 1, 4, generator=generator)
    query, keys, values = (torch.randn(*shape, generator=generator) for shape in ((120, 3, 10), (3, 6, 8), (3, 8, 5)))
    variant = AttentionVariant(0.3, latents=Latents(keys, values))
    stored, beside = kept(backend, latent, rotated)
    made = torch.cat([torch.einsum("hdr,tr->thd", keys, stored[:, 0]), beside.expand(-1, 3, -1)], 2)
    wanted = expected(query, made, torch.einsum("hrv,tr->thv", values, stored[:, 0]), replace(variant, latents=None))
    for parts in ([120], [40, 60, 20], [110, *[1] * 10]):
        actual = attended(backend, latent, rotated, query, parts, variant)
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_the_blocks_of_layers_of_a_shape_are_copied_together() -> None:
    """On a GPU each operation is a launch, and a request that shares part of a block copies it as it joins."""
    shape = KVShape((2, 2, 4, 2), HEAD_DIM)
    instance = GatherAttention(shape, torch.device("cpu"), torch.float32, None)
    instance.allocate(4)
    for number, cache in enumerate(instance.block_tensors()):
        cache[1] = number + 1
    with CountedCopies() as copies:
        instance.copy(source=1, target=3, tokens=10)
    assert copies.count == 2
    for number, cache in enumerate(instance.block_tensors()):
        assert cache.is_contiguous()
        assert torch.equal(cache[3, :10], cache[1, :10])
        assert (cache[3, :10] == number + 1).all()
        assert not cache[3, 10:].any()
        assert not cache[[0, 2]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_format", [None, *map(fp8, FP8), fp8(FP8[0], torch.float32)])
def test_a_copied_block_serves_as_the_original(backend, kv_format) -> None:
    instance = create(backend, 2, kv_format=kv_format)
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
    wanted = expected(query, *kept(instance, key, value), AttentionVariant(0.3))
    torch.testing.assert_close(outputs[0], wanted, rtol=1e-4, atol=1e-5)
