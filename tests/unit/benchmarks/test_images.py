"""Photographs to send, and what is measured of text streams beside them."""

from benchmarks.images import Beside, photograph
from tgi_server.router.media.data_urls import data_of
from tgi_server.router.media.worker import decoded


def test_each_seed_has_a_photograph_of_its_own() -> None:
    first, again, other = (photograph(seed, 64, 48) for seed in ("a", "a", "b"))
    assert first == again != other
    assert decoded(data_of(first), 64 * 48).size == (64, 48)


def test_gaps_between_replies_do_not_count() -> None:
    beside = Beside()
    beside.add(1.0, 3.0, [[0.5, 1.0, 1.5, 2.5], [2.75, 3.0, 3.5]])
    assert beside.gaps == [0.5, 1.0, 0.25]
    assert beside.row("alone")[1:4] == ["500", "1000", "1000"]
