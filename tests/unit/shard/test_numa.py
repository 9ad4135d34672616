"""The cores of NUMA nodes, as the machine describes them and as a user names them."""

import os
from pathlib import Path

import pytest

from tgi_server.engine.errors import EngineError
from tgi_server.shard.numa import cores, keep_to_node, nodes


def machine(folder: Path, *lists: str) -> Path:
    for node, text in enumerate(lists):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{text}\n")
    (folder / "has_cpu").write_text("0\n")
    return folder


@pytest.mark.parametrize(("text", "found"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set())])
def test_a_list_of_cores(text: str, found: set[int]) -> None:
    assert cores(text) == found


def test_nodes_of_the_machine_have_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = machine(tmp_path, "0-3", "4-7", "", "8-9", *[""] * 7, "10")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 4, 5, 10})
    assert nodes("auto", folder) == [{2, 3}, {4, 5}, {10}]
    assert nodes("auto", tmp_path / "none") == [{2, 3, 4, 5, 10}]
    assert nodes("4-5;2,10", folder) == [{4, 5}, {2, 10}]


@pytest.mark.parametrize("setting", ["", "0;99999", "0;0", "0-;0", "all", "0,0;"])
def test_other_lists_are_refused(setting: str) -> None:
    with pytest.raises(EngineError, match="--numa: "):
        keep_to_node(setting, 0, 2)


def test_the_number_of_shards_must_fit_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    with pytest.raises(EngineError, match="2 nodes need as many shards, or a multiple; --num-shard makes 3"):
        keep_to_node("0;1", 0, 3)
