import torch
from hypothesis import given
from hypothesis import strategies as st

from tgi_server.engine.sampling.selection import weighted_threshold

VALUES = st.floats(width=32, allow_nan=False)


@given(st.lists(st.tuples(VALUES, st.integers(0, 2**40)), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_finds_what_sorting_finds(tokens: list[tuple[float, int]], share: float) -> None:
    total = sum(weight for _, weight in tokens)
    target = min(max(1, round(share * total)), total)
    if target == 0:
        return
    values = torch.tensor([[value for value, _ in tokens]])
    weights = torch.tensor([[weight for _, weight in tokens]])
    threshold = weighted_threshold(values, weights, torch.tensor([[target]]))
    running = 0
    for value in sorted({value for value, _ in tokens}):
        at = sum(weight for other, weight in tokens if other == value)
        if running + at >= target:
            break
        running += at
    assert (threshold.value.item(), threshold.below.item(), threshold.at.item()) == (value, running, at)
