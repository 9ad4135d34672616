"""The warpers keep what those of transformers keep."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tgi_server.engine.sampling import warpers

SLACK = 2e-6  # of probability: float32 sums of transformers are as wrong as this
SHARES = st.floats(0.01, 0.99)


@st.composite
def scores(draw: st.DrawFn) -> Tensor:
    """A few rows in float32: smooth, of bfloat16 precision, with many ties, with excluded tokens."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 17, 300, 1031])))
    values = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 0.3, 3.0, 20.0]))
    kind = draw(st.sampled_from(["float32", "bfloat16", "integers"]))
    values = values.bfloat16().float() if kind == "bfloat16" else values.round() if kind == "integers" else values
    if draw(st.booleans()):
        excluded = torch.rand(shape, generator=generator) < 0.5
        excluded[:, draw(st.integers(0, shape[1] - 1))] = False
        values = values.masked_fill(excluded, -torch.inf)
    return values


def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def per_row(draw: st.DataObject, strategy: st.SearchStrategy[float], rows: Tensor) -> list[float]:
    return draw.draw(st.lists(strategy, min_size=len(rows), max_size=len(rows)))


def kept(row: Tensor) -> Tensor:
    return row > -torch.inf


@given(scores(), st.data())
def test_temperature(rows: Tensor, data: st.DataObject) -> None:
    values = per_row(data, st.floats(0.01, 10.0), rows)
    result = warpers.temperature(rows.clone(), column(values))
    for row, expected, value in zip(result, rows, values, strict=True):
        assert torch.equal(row, TemperatureLogitsWarper(value)(None, expected))


@pytest.mark.parametrize("largest_sorted", [0, warpers.LARGEST_SORTED_TOP_K])
@settings(deadline=None)
@given(data=st.data())
def test_top_k(data: st.DataObject, largest_sorted: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warpers, "LARGEST_SORTED_TOP_K", largest_sorted)
        rows = data.draw(scores())
        values = per_row(data, st.integers(1, rows.shape[1]), rows)
        result = warpers.top_k(rows.clone(), column(values, torch.int64), max(values))
    for row, before, value in zip(result, rows, values, strict=True):
        assert torch.equal(row, TopKLogitsWarper(value)(None, before[None])[0])


@settings(deadline=None)
@given(scores(), st.data())
def test_top_p(rows: Tensor, data: st.DataObject) -> None:
    values = per_row(data, SHARES, rows)
    result = warpers.top_p(rows.clone(), column(values, torch.float64))
    for row, before, value in zip(result, rows, values, strict=True):
        fewest, most = (
            int(kept(TopPLogitsWarper(value + slack)(None, before[None].double())).sum()) for slack in (-SLACK, SLACK)
        )
        count = int(kept(row).sum())
        # Where exclusion has left tokens of no weight, transformers may count them among the kept.
        assert min(fewest, int(kept(before).sum())) <= count <= most
        best = before.argsort(stable=True)[-count:]
        assert torch.equal(row, torch.full_like(before, -torch.inf).scatter(0, best, before[best]))


@settings(deadline=None)
@given(scores(), st.data())
def test_typical_p(rows: Tensor, data: st.DataObject) -> None:
    values = per_row(data, SHARES, rows)
    result = warpers.typical_p(rows.clone(), column(values, torch.float64))
    for row, before, value in zip(result, rows, values, strict=True):
        logprobs = before.double().log_softmax(-1)
        distance = (-logprobs + (logprobs * logprobs.exp()).nansum()).abs()
        fewest, most = (
            distance[kept(TypicalLogitsWarper(value + slack)(None, before[None].double())[0])].max()
            for slack in (-SLACK, SLACK)
        )
        assert kept(row)[distance < fewest - 1e-5].all()
        assert not kept(row)[distance > most + 1e-5].any()
        assert torch.equal(row[kept(row)], before[kept(row)])


@given(scores(), st.data())
def test_min_p(rows: Tensor, data: st.DataObject) -> None:
    values = per_row(data, SHARES, rows)
    result = warpers.min_p(rows.clone(), column(values))
    for row, before, value in zip(result, rows, values, strict=True):
        fewest, most = (kept(MinPLogitsWarper(value + slack)(None, before[None])[0]) for slack in (SLACK, -SLACK))
        assert (kept(row) >= fewest).all()
        assert (kept(row) <= most).all()


@pytest.mark.parametrize("vocab", [64, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "theirs", "value"),
    [(warpers.top_p, TopPLogitsWarper, p) for p in (0.1, 0.5, 0.9, 0.99)]
    + [(warpers.typical_p, TypicalLogitsWarper, p) for p in (0.2, 0.95)]
    + [(warpers.min_p, MinPLogitsWarper, p) for p in (0.01, 0.3)],
)
def test_same_scores_as_transformers(ours, theirs, value: float, vocab: int, dtype: torch.dtype) -> None:
    rows = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(7)) * 2.5).to(dtype).float()
    expected = theirs(value)(None, rows)
    column_type = torch.float32 if ours is warpers.min_p else torch.float64
    result = ours(rows.clone(), column([value] * 4, column_type))
    # Which of several equals top_p keeps depends, in transformers, on an unstable sort: what is kept is compared in
    # order of score. One token in 50257 at the edge may fall to either side, its weight being less than the rounding
    # errors of a float32 sum.
    for row, other in zip(result, expected, strict=True):
        ours_kept, theirs_kept = (x[kept(x)].sort(descending=True).values for x in (row, other))
        assert abs(len(ours_kept) - len(theirs_kept)) <= (vocab > 1000)
        both = min(len(ours_kept), len(theirs_kept))
        assert torch.equal(ours_kept[:both], theirs_kept[:both])


def test_rows_without_a_possible_token_stay_so() -> None:
    rows = torch.full((2, 50), -torch.inf)
    for warp in (warpers.top_p, warpers.typical_p):
        assert not kept(warp(rows.clone(), column([0.5, 0.9], torch.float64))).any()


VALUES = st.floats(width=32, allow_nan=False)


@given(st.lists(st.tuples(VALUES, st.integers(0, 2**40)), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_a_weighted_threshold_is_what_sorting_finds(tokens: list[tuple[float, int]], share: float) -> None:
    total = sum(weight for _, weight in tokens)
    target = min(max(1, round(share * total)), total)
    if target == 0:
        return
    values = torch.tensor([[value for value, _ in tokens]])
    weights = torch.tensor([[weight for _, weight in tokens]])
    threshold = warpers.weighted_threshold(values, weights, torch.tensor([[target]]))
    running = 0
    for value in sorted({value for value, _ in tokens}):
        at = sum(weight for other, weight in tokens if other == value)
        if running + at >= target:
            break
        running += at
    assert (threshold.value.item(), threshold.below.item(), threshold.at.item()) == (value, running, at)
