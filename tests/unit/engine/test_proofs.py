"""A result that is computed in two ways is used if both agree; otherwise the reason is reported."""

import math
from collections.abc import Iterator

import pytest
import torch

from tgi_server.engine.errors import PeerLost, UnsupportedModel
from tgi_server.engine.proofs import Case, fault_of, logits_error, relative_error, row_error

ONES = torch.ones(2, 4)


def fault(actual: torch.Tensor, known: torch.Tensor = ONES, allowance: float = 0.0) -> str | None:
    return fault_of("the kernel", lambda: [("", known, known), ("for 2 rows", actual, known)], allowance=allowance)


def test_a_difference_is_a_fault_from_the_tolerance_on():
    assert fault(ONES) is None
    assert fault(1.00005 * ONES) is None
    assert fault(1.01 * ONES) == "the kernel is off by 0.01 for 2 rows"
    assert fault(1.01 * ONES, allowance=0.02) is None
    assert fault((1.01 * ONES).bfloat16(), ONES.bfloat16()) is None
    assert fault(torch.nan * ONES) == "the kernel is off by nan for 2 rows"
    assert fault(ONES, 0 * ONES) is not None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TypeError("no such program"), "the kernel fails (TypeError: no such program)"),
        (UnsupportedModel("the cache is too small"), "the cache is too small"),
    ],
)
def test_what_raises_is_at_fault(error: Exception, words: str):
    def cases() -> Iterator[Case]:
        yield "", ONES, ONES
        raise error

    assert fault_of("the kernel", cases) == words


def test_a_lost_peer_is_no_fault_of_a_kernel():
    def cases() -> Iterator[Case]:
        raise PeerLost("rank 1 is gone")
        yield

    with pytest.raises(PeerLost):
        fault_of("the kernel", cases)


def test_one_row_may_be_worse_than_the_whole():
    actual = ONES.clone()
    actual[1] *= 2
    assert relative_error(actual, ONES) == pytest.approx(0.5**0.5)
    assert row_error(actual.view(2, 2, 2), ONES.view(2, 2, 2)) == pytest.approx(1)


def test_rows_of_zeros_are_equal_to_each_other() -> None:
    expected = torch.ones(3, 4)
    expected[1] = 0
    assert logits_error(expected.clone(), expected) == 0
    changed = expected.clone()
    changed[1] = 1
    assert logits_error(changed, expected) == math.inf


def test_one_row_may_differ_where_the_last_bit_may_choose_an_expert() -> None:
    expected = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    actual = expected.clone()
    actual[1] *= 1.5
    assert logits_error(actual, expected) == pytest.approx(0.5)
    assert logits_error(actual.bfloat16(), expected.bfloat16()) == 0
    actual[3] *= 1.25
    assert logits_error(actual.bfloat16(), expected.bfloat16()) == pytest.approx(0.25, abs=0.01)
    actual[0, 0] = torch.nan
    assert math.isnan(logits_error(actual.bfloat16(), expected.bfloat16()))
