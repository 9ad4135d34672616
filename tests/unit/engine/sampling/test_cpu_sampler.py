"""The kernel chooses what torch chooses, and what the distribution says."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.sampling import CpuSampler, Sampler, TokenMask, Tokens

from .conftest import new_torch_sampler
from .reference import processed

pytestmark = pytest.mark.skipif(not load_kernels(), reason="the kernels cannot be compiled here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARAMETERS = st.builds(
    SamplingParameters,
    do_sample=st.sampled_from([True, True, True, False]),
    temperature=st.sampled_from([1.0, 0.3, 0.7, 2.0, 1e-30]),
    top_k=st.sampled_from([0, 0, 1, 5, 50, 1000, 10**6]),
    top_p=st.sampled_from([1.0, 0.37, 0.9, 0.999, 1e-9]),
    typical_p=st.sampled_from([1.0, 1.0, 0.41, 0.87]),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 1e-7]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 1.1]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    count_penalty=st.sampled_from([0.0, 0.8, -1.3]),
    seed=st.integers(0, 2**64 - 1),
    watermark=st.sampled_from([False, False, True]),
    logit_bias=st.sampled_from([{}, {0: 3.0}]),
    min_tokens=st.sampled_from([0, 2]),
    late_tokens=st.just((0,)),
)


@st.composite
def logits(draw: st.DrawFn, vocabularies: Sequence[int]) -> Tensor:
    """A few rows: flat, steep, with ties, with tokens or whole rows that are not possible, with NaN."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 4)), draw(st.sampled_from(vocabularies)))
    values = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 0.3, 1.0, 3.0, 10.0]))
    if draw(st.booleans()):
        values = values.round()
    for odd in (-torch.inf, torch.nan):
        if draw(st.integers(0, 3)) == 0:
            values[torch.rand(shape, generator=generator) < 0.3] = odd
            if draw(st.booleans()):
                values[0] = odd
    return values.to(draw(st.sampled_from(DTYPES)))


def same(draw: st.DataObject, values: Tensor, parameters: Sequence[SamplingParameters]) -> None:
    """Both samplers take three steps; the second and the third with the tokens of those before to penalise."""
    rows, vocab = values.shape
    samplers: list[Sampler] = [CpuSampler(rows, vocab), new_torch_sampler(rows, vocab)]
    tokens = st.lists(st.integers(0, vocab - 1), max_size=9)
    for row, each in enumerate(parameters):
        report = ReportParameters(draw.draw(st.booleans()), draw.draw(st.sampled_from([0, 1, 5])))
        prompt, generated = [0, *draw.draw(tokens)], draw.draw(tokens)
        for sampler in samplers:
            sampler.add(row, each, report, prompt, generated)
    words = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=-(-vocab // 32), max_size=-(-vocab // 32))
    mask = None
    if vocab < 10_000 and draw.draw(st.booleans()):
        bits = torch.tensor([draw.draw(words)], dtype=torch.int32)
        mask = TokenMask(bits, [draw.draw(st.integers(0, rows - 1))])
    for _ in range(3):
        ours, theirs = (sampler.sample(values.clone(), range(rows), mask) for sampler in samplers)
        compare(ours.start_copy().wait(), theirs.start_copy().wait())
        for sampler in samplers:
            sampler.accept(theirs.token_ids, range(rows))


# torch adds up float32: with 256,000 tokens its log-probabilities are wrong by 2e-4.
def compare(ours: Tokens, theirs: Tokens) -> None:
    assert ours.ids == theirs.ids
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=5e-4, nan_ok=True)
    assert ours.top_tokens.keys() == theirs.top_tokens.keys()
    for row, top in theirs.top_tokens.items():
        # torch leaves open which ties are reported where there are too many
        assert [value for _, value in ours.top_tokens[row]] == pytest.approx(
            [value for _, value in top], abs=5e-4
        ) or len(top) > 16
        if len(top) <= 16:
            assert [token for token, _ in ours.top_tokens[row]] == [token for token, _ in top]


@settings(deadline=None)
@given(logits([1, 2, 17, 511, 512, 1031]), st.data())
def test_the_kernel_chooses_what_torch_chooses(values: Tensor, data: st.DataObject) -> None:
    same(data, values, data.draw(st.lists(PARAMETERS, min_size=len(values), max_size=len(values))))


@settings(deadline=None, max_examples=5)
@given(logits([49_152, 256_000]), st.data())
def test_and_so_it_does_with_large_vocabularies(values: Tensor, data: st.DataObject) -> None:
    same(data, values, data.draw(st.lists(PARAMETERS, min_size=len(values), max_size=len(values))))


def _few_likely(vocab: int) -> Tensor:
    """Three likely tokens, at places that a sample of the vocabulary easily misses, and many that are not."""
    values = torch.randn(vocab)
    values[[vocab // 3 + 17, vocab // 2 + 5, vocab - 2]] = 9.0
    return values


_LARGE_ROWS: dict[str, Callable[[int], Tensor]] = {
    "flat": lambda vocab: torch.randn(vocab) * 0.5,
    "steep": lambda vocab: torch.randn(vocab) * 4,
    "few likely": _few_likely,
    "equal": lambda vocab: torch.ones(vocab),
    "two values": lambda vocab: torch.arange(vocab) % 5 // 4 * 0.5,
    "ordered": lambda vocab: torch.linspace(-3, 3, vocab),
    "mostly impossible": lambda vocab: torch.where(torch.rand(vocab) < 0.9, -torch.inf, torch.randn(vocab)),
}


@pytest.mark.parametrize("kind", _LARGE_ROWS)
def test_thresholds_are_the_same_however_well_a_sample_foretells_them(kind: str) -> None:
    torch.manual_seed(0)
    vocab = 20_000
    kinds = [
        SamplingParameters(True, 0.7, top_p=0.9),
        SamplingParameters(True, 1.0, top_p=0.5),
        SamplingParameters(True, 1.3, top_p=0.999),
        SamplingParameters(True, 0.7, top_p=0.01),
        SamplingParameters(True, 0.9, typical_p=0.8),
        SamplingParameters(True, 1.0, top_k=11_000),
    ]
    values = _LARGE_ROWS[kind](vocab).bfloat16().repeat(len(kinds), 1)
    samplers: list[Sampler] = [CpuSampler(len(kinds), vocab), new_torch_sampler(len(kinds), vocab)]
    for seed in range(3):
        for sampler in samplers:
            for row, each in enumerate(kinds):
                sampler.add(row, replace(each, seed=seed), ReportParameters(True, 5), [1], [])
        ours, theirs = (sampler.sample(values.clone(), range(len(kinds))) for sampler in samplers)
        compare(ours.start_copy().wait(), theirs.start_copy().wait())


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(True, 0.7),
        SamplingParameters(True, 0.7, top_p=0.9),
        SamplingParameters(True, 1.3, top_k=40),
        SamplingParameters(True, 1.0, top_k=60, top_p=0.8, min_p=0.02, repetition_penalty=1.4),
        SamplingParameters(True, 1.0, typical_p=0.7),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_follow_the_distribution(parameters: SamplingParameters, dtype: torch.dtype) -> None:
    """Chi-square over fixed logits, each draw with a seed of its own."""
    vocab, draws = 300, 6_000
    values = (torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    sampler = CpuSampler(1, vocab)
    counts = torch.zeros(vocab)
    for seed in range(draws):
        sampler.add(0, replace(parameters, seed=seed), ReportParameters(), [1, 2, 3], [])
        counts[sampler.sample(values.unsqueeze(0), [0]).token_ids] += 1
    expected = processed(values, parameters, [1, 2, 3], []).softmax(-1) * draws
    assert not counts[expected == 0].any()
    likely = expected >= 5
    observed, wanted = counts[likely], expected[likely]
    rare = (counts[~likely].sum() - expected[~likely].sum()) ** 2 / expected[~likely].sum().clamp_min(5)
    chi_squared = ((observed - wanted) ** 2 / wanted).sum() + rare
    freedom = int(likely.sum())
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("own_threads", [0, 3])
def test_the_same_whatever_the_rows_and_threads(threads: int, own_threads: int) -> None:
    vocab, rows = 5000, 19
    values = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2).bfloat16()
    report = ReportParameters(True, 3)
    kinds = [SamplingParameters(True, 0.8, 50 * (row % 3), 0.9, seed=row) for row in range(rows)]
    before, own = torch.get_num_threads(), torch.ops.oatmill.set_own_threads(own_threads)
    torch.set_num_threads(threads)
    try:
        together = sampled(kinds, report, values)
        for row in range(rows):
            alone = sampled(kinds[row : row + 1], report, values[row : row + 1])
            assert (together.ids[row], together.logprobs[row]) == (alone.ids[0], alone.logprobs[0])
            assert together.top_tokens[row] == alone.top_tokens[0]
    finally:
        torch.set_num_threads(before)
        torch.ops.oatmill.set_own_threads(own)


def sampled(kinds: Sequence[SamplingParameters], report: ReportParameters, values: Tensor) -> Tokens:
    sampler = CpuSampler(len(kinds), values.shape[1])
    for row, kind in enumerate(kinds):
        sampler.add(row, kind, report, [1, 2], [])
    return sampler.sample(values, range(len(kinds))).start_copy().wait()


def test_greedy_rows_and_their_logprobs_need_no_rows_of_the_sampler() -> None:
    values = torch.randn(5, 700)
    tokens = CpuSampler(1, 700).greedy(values, [1, 4]).start_copy().wait()
    logprobs = values.log_softmax(-1)
    assert tokens.ids == values.argmax(-1).tolist()
    assert tokens.logprobs == pytest.approx({row: logprobs[row].max().item() for row in (1, 4)}, abs=1e-5)


def test_many_equal_top_tokens_are_cut_for_each_row_alone() -> None:
    tokens = sampled([SamplingParameters()], ReportParameters(True, 2), torch.zeros(1, 100))
    assert [token for token, _ in tokens.top_tokens[0]] == list(range(18))
