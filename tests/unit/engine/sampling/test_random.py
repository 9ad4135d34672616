import math

import pytest
import torch

from tgi_server.engine.sampling.random import as_int64, draw, uniform


def numbers(seed: int, count: int) -> torch.Tensor:
    return uniform(torch.full((count,), as_int64(seed)), torch.arange(count))


def test_uniform_is_splitmix64() -> None:
    """Against the generator as its authors wrote it, with Python's integers."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        state = mixed((seed + golden) % 2**64)
        expected = [(mixed((state + step * golden) % 2**64) >> 11) / 2**53 for step in range(100)]
        assert numbers(seed, 100).tolist() == expected


def test_uniform_is_uniform() -> None:
    sample = torch.cat([numbers(seed, 1000) for seed in range(100)])
    counts = torch.histc(sample, 50, 0.0, 1.0)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_squared < 85  # 49 degrees of freedom: one in a thousand is above


def test_neighbouring_seeds_and_steps_are_unrelated() -> None:
    table = torch.stack([numbers(seed, 500) for seed in range(500)])
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 0.01


@pytest.mark.parametrize("tokens", [5, 257, *(pytest.param(each, marks=pytest.mark.slow) for each in (256, 1000))])
def test_draws_follow_the_distribution(tokens: int) -> None:
    scores = torch.randn(tokens, generator=torch.Generator().manual_seed(tokens))
    drawn = draw(scores.expand(20000, -1), numbers(3, 20000))
    expected = scores.softmax(-1) * 20000
    chi_squared = ((torch.bincount(drawn, minlength=tokens) - expected) ** 2 / expected).sum()
    assert chi_squared < tokens + 5 * (2 * tokens) ** 0.5


def test_draw_inverts_the_cumulative_distribution() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.0, 0.5]]).log().expand(8, -1)
    aims = torch.tensor([0.0, 0.099, 0.101, 0.499, 0.501, 0.7, 0.99, 1 - 2**-53], dtype=torch.float64)
    assert draw(scores, aims).tolist() == [0, 0, 1, 1, 3, 3, 3, 3]


def test_rounding_never_leads_past_the_last_possible_token() -> None:
    """Weights that add up to 2**54 + 3, which float64 rounds up, and a token after them that weighs nothing."""
    scores = torch.zeros(1, 2**14 + 2)
    scores[0, -2:] = torch.tensor([math.log(3.5 * 2**-40), -torch.inf])
    assert draw(scores, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [2**14]


def test_only_possible_tokens_are_drawn() -> None:
    scores = torch.full((1000, 700), -torch.inf)
    scores[:, [3, 300, 699]] = 1.0
    assert set(draw(scores, numbers(1, 1000)).tolist()) == {3, 300, 699}
