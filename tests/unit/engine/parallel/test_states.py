"""Shards of models with states, each with those of its heads: what holds for the states of one process holds here."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.requests import expected_tokens
from tests.unit.engine.runners import test_states as states
from tgi_server.engine.parallel import ShardGroup


def run(group: ShardGroup, check: Callable[..., None], folder: Path, replies: list[list[int]], *values: object) -> None:
    case = states.Case(folder, replies, group)
    check(case.load(), case, *values)


def draft(group: ShardGroup, folder: Path, replies: list[list[int]]) -> None:
    states.test_wrong_drafts_leave_no_trace(states.Case(folder, replies, group), 3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "jamba", "kimi_linear", "lfm2", "qwen3_next"])
def test_shards_compute_states_as_the_whole_model_does(family: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    folder, ranks = make(family, tmp_path), ranks_of(2)
    replies = expected_tokens(folder, states.TEXTS)
    ranks.run(run, states.test_prompts_in_chunks, folder, replies, 7)
    ranks.run(run, states.test_sequences_that_are_preempted_at_any_step_are_computed_anew, folder, replies)
    ranks.run(run, states.test_a_prefix_is_continued_from_any_snapshot, folder, replies)
    ranks.run(draft, folder, replies)
