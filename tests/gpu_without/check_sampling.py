"""The kernel that samples, in the interpreter, against plain torch: the same tokens, and the same scores to the bit."""

from itertools import product

import pytest
import torch

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.kernels.triton import sampling
from tgi_server.engine.kernels.triton.argmax import argmax
from tgi_server.engine.kernels.triton.sampling import choose
from tgi_server.engine.sampling import TorchSampler, row_kernel_fault
from tgi_server.engine.sampling.random import as_int64, draw, uniform
from tgi_server.engine.sampling.warpers import min_p, temperature, top_k, top_p

# temperature, top_k, top_p, min_p
SETTINGS = [
    *product((1.0,), (0, 7), (1.0, 0.9), (0.0,)),
    *[(0.7, 0, 0.3, 0.0), (0.7, 5000, 0.9, 0.05), (2.0, 1, 1.0, 0.0), (1.0, 0, 1.0, 0.05)],
    *[(1.0, 100, 0.9, 0.0), (9.0, 0, 0.99, 0.0)],
]


def expected(scores: torch.Tensor, t: float, k: int, p: float, m: float) -> torch.Tensor:
    """The scores after the warpers of torch; a setting that is off has none."""
    column = torch.ones(len(scores), 1)
    scores = temperature(scores.clone(), column * t)
    if k:
        k = min(k, scores.shape[1])
        scores = top_k(scores, (column * k).long(), k)
    if p != 1.0:
        scores = top_p(scores, column.double() * p)
    return min_p(scores, column * m) if m else scores


@pytest.mark.parametrize(("tokens", "at_once"), [(1, 2048), (5, 2048), (300, 64)])
@pytest.mark.parametrize("kind", ["smooth", "ties", "impossible", "few"])
def test_the_same_as_torch(tokens: int, at_once: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one look, and in several: from the candidates, and where these are too few or too many from the whole row."""
    monkeypatch.setattr(sampling, "SHAPE_OF_MANY", (at_once, 4))
    torch.manual_seed(tokens)
    rows = len(SETTINGS)
    scores = torch.randn(rows, tokens) * 3
    if kind == "ties":
        scores = scores.round()
    if kind == "few":
        scores[:, 5:-3] = -torch.inf
    if kind == "impossible":
        scores[:, ::3] = -torch.inf
        scores[0] = -torch.inf
    wanted = torch.cat([expected(row[None], *settings) for row, settings in zip(scores, SETTINGS, strict=True)])
    seeds, steps = torch.arange(rows) * as_int64(0x9E3779B97F4A7C15), torch.arange(rows) + 3
    numbers = torch.tensor([(t, p, m) for t, _, p, m in SETTINGS], dtype=torch.float64)
    counts = torch.tensor([min(k, tokens) for _, k, _, _ in SETTINGS])
    warped = torch.empty_like(scores)
    chosen = choose(scores, numbers, counts, seeds, steps, warped)
    torch.testing.assert_close(warped, wanted, rtol=0, atol=0)
    assert torch.equal(chosen, draw(wanted, uniform(seeds, steps)))
    assert torch.equal(chosen, choose(scores, numbers, counts, seeds, steps))


def test_a_row_is_chosen_for_as_if_it_were_alone() -> None:
    """Beside a row that the kernel does not take, and rows that do not sample."""
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(1))
    kinds = [
        SamplingParameters(do_sample=True, top_p=0.9, seed=4),
        SamplingParameters(do_sample=True, typical_p=0.5, seed=5),
        SamplingParameters(),
        SamplingParameters(do_sample=True, top_k=20, repetition_penalty=1.2, seed=6),
        SamplingParameters(do_sample=True, temperature=0.3, min_p=0.1, seed=7),
    ]
    report = ReportParameters(logprobs=True, top_n_tokens=2)
    together = _sampler(kinds, report).sample(logits, range(5)).start_copy().wait()
    for row, kind in enumerate(kinds):
        alone = _sampler([kind], report).sample(logits[row : row + 1], [0]).start_copy().wait()
        assert together.ids[row] == alone.ids[0]
        assert together.logprobs[row] == alone.logprobs[0]
        assert together.top_tokens[row] == alone.top_tokens[0]


def test_the_kernel_is_proved_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1))

    def new(*, row_kernel: bool) -> TorchSampler:
        return TorchSampler(6, 700, torch.device("cpu"), row_kernel=row_kernel)

    assert row_kernel_fault(new, logits) == ""
    monkeypatch.setattr("tgi_server.engine.kernels.triton.sampling.choose", lambda scores, *_: scores.argmin(-1))
    assert row_kernel_fault(new, logits) == "the kernel chooses other tokens in 100% of all rows"
    monkeypatch.setattr("tgi_server.engine.kernels.triton.sampling.choose", None)
    assert row_kernel_fault(new, logits).startswith("the kernel fails (TypeError")


def _sampler(kinds: list[SamplingParameters], report: ReportParameters) -> TorchSampler:
    sampler = TorchSampler(len(kinds), 700, torch.device("cpu"), row_kernel=True)
    for row, kind in enumerate(kinds):
        sampler.add(row, kind, report, [1, 2, 3], [])
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [7, 4096, 9001])
def test_the_argmax_is_the_first_of_equals(tokens: int, dtype: torch.dtype) -> None:
    scores = torch.randint(-9, 9, (5, tokens + 3)).to(dtype)[:, :tokens]
    scores[1], scores[2] = float("-inf"), float("nan")
    scores[3, tokens - 1] = 99
    wanted = torch.tensor([int((row == row.max()).nonzero()[0, 0]) for row in scores[[0, 1, 3, 4]].float()])
    found = argmax(scores)
    assert torch.equal(found[[0, 1, 3, 4]], wanted)
    assert 0 <= int(found[2]) < tokens
