import pytest

from llm_functionalities.endpoint.call import Deadline


@pytest.mark.parametrize(
    ("timeout_ms", "caller_seconds", "expected"),
    [
        (0, None, 10.0),
        (-5, None, 10.0),
        (1500, None, 1.5),
        (60_000, None, 60.0),  # the default is for those who set none
        (0, 2.0, 1.95),
        (1500, 30.0, 1.5),
        (30_000, 2.0, 1.95),
        (0, 0.1, 0.08),  # a short deadline keeps most of its time
        (0, 0.0, 0.0),
        (100_001, None, 100.0),  # nobody gets more than the longest time
        (2**31 - 1, 1e7, 100.0),
    ],
)
def test_the_sooner_of_what_is_set(timeout_ms: int, caller_seconds: float | None, expected: float) -> None:
    deadline = Deadline.of_request(timeout_ms, caller_seconds, default_seconds=10.0, longest_seconds=100.0)
    assert deadline.remaining() == pytest.approx(expected, abs=0.01)


def test_within_is_never_later() -> None:
    deadline = Deadline.after(1.0)
    assert deadline.within(5.0).at == deadline.at
    assert deadline.within(0.2).remaining() == pytest.approx(0.2, abs=0.01)
