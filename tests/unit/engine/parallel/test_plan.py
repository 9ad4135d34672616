import pytest

from tgi_server.engine.parallel.layers import RowParallel, VocabParallelHead
from tgi_server.engine.parallel.plan import FIRST_ONLY, ShardingPlan, column_parallel, row_parallel, vocab_parallel_head
from tgi_server.engine.parallel.shares import Heads, share_of

HEADS = Heads(4, 2)
PLAN = ShardingPlan(
    HEADS,
    ("self_attn",),
    {
        "up": column_parallel(),
        "mlp.down": row_parallel(),
        "experts.*.w1": column_parallel(),
        "head": vocab_parallel_head(),
    },
    whole=("router",),
)


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("model.layers.0.up", "up"),
        ("model.layers.0.mlp.down", "mlp.down"),
        ("model.layers.0.experts.31.w1", "experts.*.w1"),
        ("head", "head"),
        ("model.layers.0.group", None),
        ("model.layers.0.down", None),
        ("model.layers.0.experts.x.w1", None),
    ],
)
def test_a_module_is_found_by_the_end_of_its_path(path: str, end: str | None) -> None:
    assert PLAN.split(path) is (PLAN.splits[end] if end else None)


def test_column_parallel_weights_are_sliced_by_outputs_and_row_parallel_ones_by_inputs() -> None:
    share = share_of(1, 2, HEADS)
    column, row = PLAN.slice("layers.0.up.weight"), PLAN.slice("layers.0.mlp.down.weight")
    assert column is not None
    assert row is not None
    assert column.shape(share, (6, 8)) == (3, 8)
    assert row.shape(share, (6, 8)) == (6, 4)
    assert PLAN.slice("layers.0.mlp.down.bias") is FIRST_ONLY
    assert FIRST_ONLY.shape(share, (6,)) == (6,)
    assert PLAN.slice("layers.0.norm.weight") is None


def test_layers_that_bring_results_together_stand_around_rows_and_the_head() -> None:
    layers = {end: split.layer for end, split in PLAN.splits.items()}
    assert layers == {"up": None, "mlp.down": RowParallel, "experts.*.w1": None, "head": VocabParallelHead}


def test_whole_modules_are_named_by_the_end_of_their_path() -> None:
    assert PLAN.is_whole("router")
    assert PLAN.is_whole("layers.3.router")
    assert not PLAN.is_whole("layers.3.subrouter")
