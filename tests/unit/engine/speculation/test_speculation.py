from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tiny_models import make
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.speculation import Speculation
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.draft import Draft
from tgi_server.engine.speculation.drafters import Drafter, HistoryDrafter, NgramDrafter

BLOCK = 4
FREE = StepCosts({1: 1.0}, {1: 1.0})
# A token more takes a twentieth of a step.
DEAR = StepCosts({1: 1.0, 21: 2.0}, {1: 1.0, 21: 2.0})


class Sevens(Drafter):
    """Always proposes 7, as often as it may."""

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        return {sequence: [7] * tokens for sequence, tokens in room.items()}


def _speculation(*drafters: Drafter, most: int = 8, costs: StepCosts = FREE) -> Speculation:
    speculation = Speculation(most, drafters)
    speculation.costs = costs
    return speculation


def _sequence(request_id: int = 1, *, blocks: int = 10, new: int = 100, **options) -> RunningSequence:
    sequence = RunningSequence(
        request_id, [1, 2, 3], StoppingParameters(new), blocks=list(range(1, blocks + 1)), **options
    )
    sequence.append([4])
    return sequence


def _lengths(drafts: list[Draft]) -> list[int]:
    return [len(draft.tokens) for draft in drafts]


def test_drafts_fit_into_blocks_and_length() -> None:
    speculation = _speculation(Sevens())
    assert _lengths(speculation.plan([_sequence()], 1, BLOCK)) == [8]
    # Of eight slots four are taken; the token that is chosen next needs one, and one has to be left for the step after.
    assert _lengths(speculation.plan([_sequence(blocks=2)], 1, BLOCK)) == [3]
    assert speculation.plan([_sequence(blocks=1)], 1, BLOCK) == []
    assert _lengths(speculation.plan([_sequence(new=4)], 1, BLOCK)) == [2]
    assert speculation.plan([_sequence(new=2)], 1, BLOCK) == []


def test_the_first_drafter_that_has_a_draft_is_taken() -> None:
    speculation = _speculation(HistoryDrafter(), NgramDrafter(), Sevens(), most=2)
    known, repeating, other = _sequence(1, earlier_reply=[4, 5, 6]), _sequence(2), _sequence(3)
    repeating.append([8, 9, 4, 8])
    drafts = {
        draft.sequence.request_id: draft.tokens for draft in speculation.plan([known, repeating, other], 3, BLOCK)
    }
    assert drafts == {1: [5, 6], 2: [9, 4], 3: [7, 7]}


def test_without_measurements_nothing_is_drafted() -> None:
    assert Speculation(4, [Sevens()]).plan([_sequence()], 1, BLOCK) == []


def _steps(speculation: Speculation, sequence: RunningSequence, right: bool, count: int) -> list[int]:
    """Lets steps pass in which all drafted tokens are right, or all wrong. Returns how many were drafted in each."""
    drafted = []
    for _ in range(count):
        drafts = speculation.plan([sequence], 1, BLOCK)
        drafted.append(sum(_lengths(drafts)))
        for draft in drafts:
            while draft.accept(7 if right else 8):
                pass
            draft.learn()
    return drafted


def test_who_accepts_drafts_gets_more_of_them_and_who_does_not_gets_fewer() -> None:
    willing = _steps(_speculation(Sevens(), costs=DEAR), _sequence(), True, 20)
    unwilling = _steps(_speculation(Sevens(), costs=DEAR), _sequence(), False, 200)
    assert willing[-1] == 8 > willing[0]
    assert unwilling[0] == willing[0]
    assert sum(unwilling) <= 30
    assert 0 < sum(unwilling[100:]) <= 10  # it is tried again


def test_who_comes_while_others_accept_drafts_gets_many_at_once() -> None:
    speculation = _speculation(Sevens(), costs=DEAR)
    (first,) = _steps(speculation, _sequence(), True, 1)
    _steps(speculation, _sequence(), True, 10)
    assert _steps(speculation, _sequence(), True, 1) == [8] > [first]
    for _ in range(30):
        _steps(speculation, _sequence(), False, 1)
    assert _steps(speculation, _sequence(), True, 1) == [first]


def test_where_tokens_are_dear_nothing_is_drafted() -> None:
    speculation = _speculation(Sevens(), costs=StepCosts({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0}))
    assert _steps(speculation, _sequence(), True, 5) == [0] * 5


def test_a_draft_is_right_up_to_the_first_token_that_was_not_chosen() -> None:
    draft = Draft(_sequence(), [5, 6, 7])
    assert [draft.accept(token) for token in (5, 6, 8)] == [True, True, False]
    assert (draft.accepted, draft.refused) == (2, True)
    whole = Draft(_sequence(), [5])
    assert [whole.accept(token) for token in (5, 9)] == [True, False]
    assert (whole.accepted, whole.refused) == (1, False)


def test_models_that_cannot_speculate_refuse_to(tmp_path: Path) -> None:
    folder = make("mamba", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"mamba models run in padded batches.*leave out --speculate"):
        Engine(EngineConfig(folder, speculate=2))
