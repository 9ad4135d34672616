"""Limits of control groups, in file systems as containers see them."""

import math
import os
from pathlib import Path

import pytest

from shared.control_groups import cpu_quota, free_memory, usable_cores

V2 = "30 24 0:26 {root} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 24 0:29 {root} {mount} rw,relatime shared:5 - cgroup cgroup rw,{controller}"


def process(folder: Path, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """Makes a folder as /proc/self, and groups' files below `folder`."""
    for name, text in {"proc/cgroup": groups, "proc/mountinfo": "\n".join(mounts), **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "proc"


def in_container(folder: Path, cpu_max: str) -> Path:
    """Returns a process as `docker run` starts it today: its group looks to it like the outermost."""
    return process(folder, "0::/\n", [V2.format(root="/", mount=folder / "cg")], {"cg/cpu.max": cpu_max})


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("12800000 100000\n", 64),
        ("max 100000\n", 64),
        ("\n", 64),
        ("nonsense", 64),
        ("0 0", 64),
    ],
)
def test_a_quota_counts_rounded_up(tmp_path: Path, cpu_max: str, cores: int) -> None:
    assert usable_cores(in_container(tmp_path, cpu_max)) == cores


def test_the_least_of_the_quota_and_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7})
    assert usable_cores(in_container(tmp_path, "800000 100000")) == 3


@pytest.mark.parametrize(
    ("outer", "inner", "quota"), [("max", "400000", 4), ("300000", "max", 3), ("50000", "9000000", 0.5)]
)
def test_quotas_of_outer_groups_count(tmp_path: Path, outer: str, inner: str, quota: float) -> None:
    mounts = [V2.format(root="/", mount=tmp_path / "cg")]
    files = {
        "cg/kubepods/cpu.max": f"{outer} 100000",
        "cg/kubepods/pod1/cpu.max": f"{inner} 100000",
        "cg/other/cpu.max": "1000 100000",
    }
    assert cpu_quota(process(tmp_path, "0::/kubepods/pod1/container\n", mounts, files)) == quota


def test_version_1_is_read_where_its_controller_is_mounted(tmp_path: Path) -> None:
    mounts = [
        V2.format(root="/", mount=tmp_path / "unified"),
        V1.format(root="/docker/abc", mount=tmp_path / "cpu", controller="cpu,cpuacct"),
        V1.format(root="/docker/abc", mount=tmp_path / "memory", controller="memory"),
    ]
    files = {
        "cpu/cpu.cfs_quota_us": "250000",
        "cpu/cpu.cfs_period_us": "100000",
        "cpu/inner/cpu.cfs_quota_us": "-1",
        "cpu/inner/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "1000",
        "memory/memory.usage_in_bytes": "400",
    }
    groups = "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc/inner\n0::/\n"
    found = process(tmp_path, groups, mounts, files)
    assert cpu_quota(found) == 2.5
    assert usable_cores(found) == 3
    assert free_memory(found) == 600


def test_the_least_free_memory_of_all_groups_counts(tmp_path: Path) -> None:
    files = {
        "cg/pod/memory.max": "5000",
        "cg/pod/memory.current": "4500",
        "cg/pod/container/memory.max": "900",
        "cg/pod/container/memory.current": "100",
        "cg/pod/container/worker/memory.max": "max",
        "cg/pod/container/worker/memory.current": "100",
    }
    mounts = [V2.format(root="/", mount=tmp_path / "cg")]
    assert free_memory(process(tmp_path, "0::/pod/container/worker\n", mounts, files)) == 500


@pytest.mark.parametrize("groups", ["0::/elsewhere\n", "0::/../../outside\n"])
def test_a_group_that_cannot_be_seen_has_that_of_the_mount(tmp_path: Path, groups: str) -> None:
    mounts = [V2.format(root="/docker/abc", mount=tmp_path / "cg")]
    files = {"cg/cpu.max": "200000 100000"}
    assert cpu_quota(process(tmp_path, groups, mounts, files)) == 2


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "nothing") == math.inf
    assert usable_cores(tmp_path / "nothing") == 64
    assert free_memory(tmp_path / "nothing") is None
    unreadable = process(tmp_path, "0::/\n", [V2.format(root="/", mount=tmp_path / "cg")], {})
    (tmp_path / "cg" / "cpu.max").mkdir(parents=True)
    assert usable_cores(unreadable) == 64
