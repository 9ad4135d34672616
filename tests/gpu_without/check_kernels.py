"""Every kernel in Triton's interpreter against plain torch. TRITON_INTERPRET has to be 1 before Triton is imported."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.unit.engine.backends.attention.test_backends import FP8, expected, fp8, run, run_latents
from tgi_server.engine.backends.attention import cuda
from tgi_server.engine.backends.attention.base import (
    AttentionBackend,
    AttentionVariant,
    ForwardMetadata,
    KVShape,
    Latents,
    rotate,
    rotate_pairs,
)
from tgi_server.engine.backends.attention.cuda import CudaAttention, fault_of_places
from tgi_server.engine.backends.attention.cuda_latents import LatentAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.kv_format import KVFormat, decode, encode
from tgi_server.engine.backends.decoder import Norm
from tgi_server.engine.checkpoint.quantized.kv_scales import KVScales
from tgi_server.engine.kernels.triton import QueryTiles, rope_and_cache, split_kv
from tgi_server.engine.kernels.triton.latents import LatentNorm
from tgi_server.engine.kernels.triton.split_kv import plan_parts

ERROR = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
SLOPES = torch.linspace(0.02, 0.6, 6)
VARIANTS = {
    "plain": AttentionVariant(0.2),
    "window": AttentionVariant(0.2, window=5),
    "wide window": AttentionVariant(0.2, window=90),
    "soft cap": AttentionVariant(0.2, softcap=3.0),
    "alibi": AttentionVariant(0.2, alibi_slopes=SLOPES),
    "rounded alibi": AttentionVariant(0.2, alibi_slopes=SLOPES.bfloat16().float(), rounded_alibi=True),
    "sinks": AttentionVariant(0.2, sinks=torch.linspace(-4, 12, 6)),
    "wide window, sinks": AttentionVariant(0.2, window=90, sinks=torch.linspace(-4, 12, 6)),
}


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as bare bits, which its products take for integers."""
    product = InterpreterBuilder.create_dot

    def create_dot(builder: Any, left: TensorHandle, right: TensorHandle, *rest: Any) -> TensorHandle:
        return product(builder, _widened(left), _widened(right), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture(params=[1, 64], ids=lambda count: f"{count} processors")
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Keys are cut into as many parts as keep these busy: 1 to 64 for each tile."""
    monkeypatch.setattr(split_kv, "multiprocessors", lambda device: request.param)
    return request.param


def backend(
    kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, kv_format: KVFormat | None = None
) -> CudaAttention:
    return CudaAttention(KVShape((kv_heads,), head_dim), torch.device("cpu"), dtype, kv_format)


@pytest.mark.parametrize("kind", VARIANTS)
def test_whatever_a_layer_asks_for(kind: str, processors: int) -> None:
    actual, wanted = run(backend(2, 32), 6, 2, [1, 7, 33, 300], [(0, 1), (0, 50), (150, 37), (96, 3)], VARIANTS[kind])
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [None, fp8(FP8[0])], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_one_kernel_writes_attends_and_joins(
    kind: str, kept: KVFormat | None, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves in the cache, and returns, what three kernels do, also when it runs again."""
    lengths, block = torch.tensor([1, 7, 33, 300], dtype=torch.int32), CudaAttention.block_size
    blocks = [-(-length // block) for length in lengths.tolist()]
    tables = torch.zeros(4, max(blocks), dtype=torch.int32)
    for row, own in enumerate((torch.randperm(sum(blocks)) + 1).int().split(blocks)):
        tables[row, : len(own)] = own
    last = lengths.long() - 1
    slots = tables.gather(1, (last // block)[:, None])[:, 0].long() * block + last % block
    query, key, value = torch.randn(4, 10, 32).split((6, 2, 2), 1)
    angles = torch.randn(1, 4, 12).repeat(1, 1, 2)
    results = []
    cached = [torch.randn(1 + sum(blocks), block, 2, 32) for _ in range(2)]
    for names in ("", "attend_in_one"):
        monkeypatch.setattr(cuda, "variants", lambda names=names: {names})
        instance = backend(2, 32, kv_format=kept)
        instance.allocate(1 + sum(blocks))
        for own, numbers in zip((instance._keys[0], instance._values[0]), cached, strict=True):
            own.copy_(encode(numbers, 1.0, kept.keys) if kept else numbers)
        for _ in range(2):
            starts = torch.arange(5, dtype=torch.int32)
            metadata = ForwardMetadata(slots, tables, lengths, starts, 4, [], 300)
            turns = angles.cos(), angles.sin()
            output = instance.write_and_attend(0, query, key, value, turns, metadata, VARIANTS[kind])
        results.append((output, instance._keys[0], instance._values[0]))
    for actual, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert instance._arrived is not None
    assert not instance._arrived.any()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("cached", FP8)
@pytest.mark.parametrize("keys_too", [True, False])
def test_a_cache_in_8_bits(keys_too: bool, cached: torch.dtype, dtype: torch.dtype) -> None:
    instance = backend(2, 32, dtype, fp8(cached, None if keys_too else dtype))
    for kind in ("plain", "soft cap", "rounded alibi"):
        actual, wanted = run(instance, 6, 2, [1, 33, 300], [(0, 50), (150, 37)], VARIANTS[kind])
        torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("cached", FP8)
def test_numbers_in_8_bits_are_the_nearest_ones(cached: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(cached).float()
    codes = every[every.isfinite()].sort().values
    numbers = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([1e-9, -1e-9, 1e30, -1e30])])
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 32)).view(-1, 1, 32)
    keys, values = (torch.zeros(1, len(numbers), 1, 32, dtype=torch.uint8) for _ in range(2))
    slots, mantissa = torch.arange(len(numbers)), KVFormat(cached).mantissa
    rope_and_cache.write(numbers, 2 * numbers, keys, values, slots, KVScales(1.0, 2.0), mantissa)
    wanted = decode(encode(numbers, 1.0, cached), 1.0, cached, torch.float32)
    for written in (keys, values):
        assert torch.equal(decode(written[0], 1.0, cached, torch.float32), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 80), (4, 1, 128), (2, 1, 256), (5, 1, 24)]
)
def test_heads_of_all_sizes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    variant = AttentionVariant(head_dim**-0.5)
    actual, wanted = run(backend(kv_heads, head_dim, dtype), heads, kv_heads, [1, 130], [(70, 40)], variant)
    torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


def test_more_heads_than_a_program_holds_tokens() -> None:
    actual, wanted = run(backend(1, 64), 71, 1, [7, 130], [(0, 3)], AttentionVariant(0.1))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_prompts_without_sequences_that_decode() -> None:
    actual, wanted = run(backend(2, 32), 4, 2, [], [(0, 40), (31, 2)], AttentionVariant(0.2))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def tiles(lengths: list[int], counts: list[int] | None = None) -> QueryTiles:
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    return QueryTiles(
        numbers,
        torch.ones_like(numbers) if counts is None else torch.tensor(counts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        numbers,
    )


@pytest.mark.parametrize("at_once", [4, 64])
@pytest.mark.parametrize("window", [0, 200])
def test_a_plan_gives_every_key_to_one_part(at_once: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "multiprocessors", lambda device: 66)
    monkeypatch.setattr(split_kv, "_PLANNED_AT_ONCE", at_once)
    lengths = [1, 64, 65, 40_000, 500, 0, 3, 900, 128]
    planned = tiles(lengths, [0 if length == 0 else 1 for length in lengths])
    plan = plan_parts(planned, kv_heads=4, key_tile=64, window=window)
    seen = [-(-length // 64) - (max(0, length - window) // 64 if window else 0) for length in lengths]
    parts = plan.starts.diff().tolist()
    fewest = max(2, -(-sum(seen) // 33))  # of the key tiles of a part: two programs for each of 66, with 4 KV heads
    assert parts == [-(-count // fewest) for count in seen]
    assert plan.tile_of[: plan.starts[-1]].tolist() == [tile for tile, count in enumerate(parts) for _ in range(count)]
    kept = [
        place
        for tile, count in enumerate(parts)
        if count > 1
        for place in range(plan.places[tile], plan.places[tile] + count)
    ]
    assert kept == list(range(len(kept)))
    assert len(kept) <= plan.most_kept
    assert plan.starts[-1] <= len(plan.tile_of)


def test_a_long_sequence_among_short_ones_is_cut_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "multiprocessors", lambda device: 132)
    alone = plan_parts(tiles([100_000]), kv_heads=8, key_tile=64, window=0)
    among = plan_parts(tiles([100, *[100] * 32, 100_000, *[100] * 31]), kv_heads=8, key_tile=64, window=0)
    assert int(alone.starts[-1]) == 33
    assert 31 <= int(among.starts[34] - among.starts[33]) <= 33


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 32), (24, 24), (128, 0)])
@pytest.mark.parametrize("programs", [0, 32])
def test_rotation_and_writing(
    programs: int, dtype: torch.dtype, head_dim: int, rotated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope_and_cache, "_PROGRAMS_PER_PROCESSOR", programs)
    tokens, heads, kv_heads, blocks, size = 5, 6, 2, 3, 32
    joined = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    query, key, value = joined.split((heads, kv_heads, kv_heads), dim=1)
    angles = torch.randn(tokens, rotated // 2).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([33, 2, 64, 95, 31])
    keys, values = (torch.zeros(blocks, size, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    if rotated:
        turned = rope_and_cache.rotate_and_write(query, key, value, (cosine, sine), keys, values, slots, KVScales(), 0)
        plain = AttentionBackend.rotate_and_write
        kept: list[torch.Tensor] = []

        class Plain:
            def write(self, layer, key, value, metadata) -> None:
                kept.append(key)

        wanted = plain(Plain(), 0, query.float(), key.float(), value, (cosine.float()[None], sine.float()[None]), None)
        torch.testing.assert_close(turned.float(), wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
        key = kept[0]
    else:
        rope_and_cache.write(key, value, keys, values, slots, KVScales(), 0)
    torch.testing.assert_close(keys.flatten(0, 1)[slots].float(), key.float(), rtol=ERROR[dtype], atol=ERROR[dtype])
    assert torch.equal(values.flatten(0, 1)[slots], value)
    written = torch.zeros(blocks * size, dtype=torch.bool).index_fill_(0, slots, True)
    assert not keys.flatten(0, 1)[~written].any()
    assert not values.flatten(0, 1)[~written].any()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "size", "rotated"), [(5, 24, 16), (1, 64, 64)])
def test_turning_by_positions(heads: int, size: int, rotated: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(3, heads + 2, size + 8).to(dtype)[:, :heads, :size]
    angles = torch.randn(3, rotated // 2).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    plain = rotate_pairs if interleaved else rotate
    wanted = plain(x.float(), cosine.float()[:, None], sine.float()[:, None])
    actual = rope_and_cache.turn(x, cosine, sine, interleaved=interleaved)
    torch.testing.assert_close(actual.float(), wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


def test_what_kernels_are_compared_with_is_attention() -> None:
    query, key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True, scale=0.3
    ).transpose(0, 1)
    torch.testing.assert_close(expected(query, key, value, AttentionVariant(0.3)), wanted)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("heads", "row_tokens", "chunk"), [(4, 1, 0), (20, 1, 5), (32, 3, 0), (17, 1, 0), (128, 1, 0)])
def test_latents(heads: int, row_tokens: int, chunk: int, dtype: torch.dtype, processors: int) -> None:
    instance = LatentAttention(KVShape((1,), 48, value_dim=12), torch.device("cpu"), dtype)
    actual, wanted = run_latents(instance, heads, [row_tokens, 7, 33, 300], row_tokens, chunk)
    torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize(("queries", "rotated"), [(0, 16), (40, 8)])
def test_latents_are_normalised_turned_and_written_in_one_kernel(
    queries: int, rotated: int, interleaved: bool | None, dtype: torch.dtype
) -> None:
    """interleaved: None: nothing is turned. Queries are turned where sequences attend."""
    rank, tokens, heads, size = 48, 4, 6, 16
    instance = LatentAttention(KVShape((1,), rank, value_dim=rotated), torch.device("cpu"), dtype)
    instance.allocate(9)
    joined = torch.randn(tokens, (queries or 24) + rank + rotated).to(dtype)
    query, latent, turned = joined.split((joined.shape[1] - rank - rotated, rank, rotated), 1)
    norms = [Norm(1 + torch.randn(width).to(dtype) / 4, None, 1e-5, False) for width in (query.shape[1], rank)]
    of_queries, of_keys = (LatentNorm(norm.weight, norm.eps) for norm in norms)
    angles = torch.randn(tokens, rotated // 2).repeat(1, 2)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if interleaved is not None else None
    turn = rotate_pairs if interleaved else rotate
    slots, lengths = torch.tensor([33, 64, 5 * 32 + 7, 7 * 32]), torch.tensor([2, 1, 40, 33], dtype=torch.int32)
    blocks = torch.tensor([[1, 0], [2, 0], [4, 5], [6, 7]], dtype=torch.int32)
    metadata = ForwardMetadata(slots, blocks, lengths, torch.arange(5, dtype=torch.int32), tokens, [], 40)
    for caches in (instance._keys[0], instance._values[0]):
        caches.copy_(torch.randn(caches.shape))
    own = instance.write_joined(
        0, joined, of_queries if queries else None, of_keys, tables, metadata, interleaved=bool(interleaved)
    )
    close = {"rtol": ERROR[dtype], "atol": ERROR[dtype]}
    if queries:
        torch.testing.assert_close(own, norms[0](query), **close)
    torch.testing.assert_close(instance._keys[0].flatten(0, 2)[slots], norms[1](latent), **close)
    wanted = turned if tables is None else turn(turned.float(), *(each.float() for each in tables)).to(dtype)
    torch.testing.assert_close(instance._values[0].flatten(0, 2)[slots], wanted, **close)

    given = torch.randn(tokens, heads, size + rotated).to(dtype)
    weights = [(torch.randn(heads, *shape) / 8).to(dtype) for shape in ((size, rank), (rank, 24))]
    variant = AttentionVariant(0.1, latents=Latents(*weights))
    actual = instance.attend_turning(0, given, tables, metadata, variant, interleaved=bool(interleaved))
    last = given[..., size:]
    if tables is not None:
        last = turn(last.float(), *(each.float()[:, None] for each in tables)).to(dtype)
    plain = GatherAttention(instance.shape, torch.device("cpu"), torch.float32)
    plain.block_size = instance.block_size
    plain.allocate(9)
    for kept, cache in zip((plain._keys[0], plain._values[0]), (instance._keys[0], instance._values[0]), strict=True):
        kept.copy_(cache)
    exact = replace(variant, latents=Latents(*(each.float() for each in weights)))
    expected_output = plain.attend(0, torch.cat([given[..., :size], last], 2).float(), metadata, exact)
    torch.testing.assert_close(actual.float(), expected_output, **close)


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_the_places_of_rows(rows: int) -> None:
    tables = torch.randint(1, 999, (rows + 2, 12), dtype=torch.int32)[:rows, :9]
    positions = torch.randint(0, 9 * 32, (rows,))
    positions[0] = 9 * 32 - 1
    instance = backend(2, 32)
    slots, lengths = instance.row_places(positions, tables)
    wanted_slots, wanted_lengths = AttentionBackend.row_places(instance, positions, tables)
    assert (slots.dtype, lengths.dtype) == (wanted_slots.dtype, wanted_lengths.dtype)
    assert torch.equal(slots, wanted_slots)
    assert torch.equal(lengths, wanted_lengths)
    assert fault_of_places(instance) is None
