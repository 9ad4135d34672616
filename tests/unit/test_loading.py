"""Shards say how far they are with loading, and the least far of them counts."""

from pathlib import Path

import pytest

from tgi_server import loading


def test_the_shard_that_is_least_far_counts(tmp_path: Path) -> None:
    first, second = (tmp_path / f"shard-{rank}" for rank in range(2))
    assert loading.read_progress(first) == (0, loading.IMPORTING)
    loading.write_progress(first, 60, loading.PACKING)
    loading.write_progress(second, 40, loading.READING)
    assert loading.read_progress(first) == (40, loading.READING)
    loading.remove_progress(second)
    assert loading.read_progress(first) == (60, loading.PACKING)
    loading.remove_progress(first)
    first.touch()
    assert loading.read_progress(first) == (90, loading.WARMING_UP)


def test_what_cannot_be_read_or_written_is_left_alone(tmp_path: Path) -> None:
    loading.write_progress(tmp_path / "absent" / "shard-0", 10, loading.READING)
    socket = tmp_path / "a[b-0"
    loading.progress_file(socket).write_text("half a")
    assert loading.read_progress(socket) == (0, loading.IMPORTING)
    loading.write_progress(socket, 20, loading.READING)
    assert loading.read_progress(socket) == (20, loading.READING)


@pytest.mark.parametrize(
    ("stage", "fraction", "percent"),
    [
        *((loading.IMPORTING, 0, 0), (loading.READING, 0, 15), (loading.READING, 1, 50), (loading.READING, 7, 50)),
        *((loading.PACKING, 0.5, 70), (loading.WARMING_UP, 0, 90), (loading.WARMING_UP, 1, 100)),
    ],
)
def test_stages_follow_each_other(stage: str, fraction: float, percent: int) -> None:
    assert loading.percent_of(stage, fraction) == percent
