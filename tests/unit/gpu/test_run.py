"""tests/gpu/run.sh, as far as it runs without a GPU."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.gpu import run as script
from tests.gpu.run import Job, Result


def test_jobs_pass_fail_are_skipped_and_are_ended(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    deadline = script.time.monotonic() + 60
    good = Job("good", ("-c", "print('3 passed in 1s')"), ("json",), 60)
    results = [
        script.run(good, deadline),
        script.run(replace(good, arguments=("-c", "raise SystemExit(4)")), deadline),
        script.run(replace(good, needs=("json", "no_such_module", "no_such.part")), deadline),
        script.run(replace(good, arguments=("-c", "import time; time.sleep(60)"), seconds=0.5), deadline),
        script.run(good, script.time.monotonic() + 1),
    ]
    assert [result.state for result in results] == [
        "passed",
        "failed (4)",
        "skipped",
        "failed (not done after 0 s)",
        "not run",
    ]
    assert (results[0].detail, results[2].detail) == ("3 passed in 1s", "missing: no_such_module, no_such.part")
    assert "3 passed" in (tmp_path / "log.txt").read_text()


def test_the_exit_code_tells_what_became_of_the_jobs() -> None:
    passed, failed, skipped = (Result("it", state, 1.0, "") for state in ("passed", "failed (1)", "skipped"))
    assert script.verdict([passed, skipped]) == 0
    assert script.verdict([passed, failed]) == 1
    assert script.verdict([skipped]) == 3


def test_every_job_names_what_is_there() -> None:
    for job in (*script.FIRST, *script.CHECKS, *script.BENCHMARKS):
        assert all(Path(part).exists() for part in job.arguments if part.startswith("tests/")), job.name
        assert importlib.util.find_spec(job.arguments[1]) is not None, job.name


def with_dependencies(distributions: Iterable[str]) -> set[str]:
    """Returns the names of distributions, and of all that they require, as the package index writes them."""
    found: set[str] = set()
    left = list(distributions)
    while left:
        name = re.sub("[-_.]+", "-", left.pop()).lower()
        if name not in found:
            found.add(name)
            requirements = map(Requirement, requires(name) or [])
            left += [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


def test_the_wheels_are_all_that_the_checks_need_beside_torch_and_transformers() -> None:
    lines = Path("tests/gpu/wheels.txt").read_text().splitlines()
    wheels = {line for line in lines if not line.startswith("#")}
    of_package = packages_distributions()
    modules = (*script.ENGINE, *script.SUITE, *script.SHARD, *script.ROUTER)
    needed = with_dependencies(name for module in modules for name in of_package[module.partition(".")[0]])
    assert sorted(needed - wheels - with_dependencies(("torch", "transformers"))) == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_only_the_test_that_broke_the_device_fails(processes: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        """
import pytest, torch

@pytest.mark.parametrize("number", range(6))
def test_it(number, monkeypatch):
    if number == 2:
        torch.cuda.is_initialized = lambda: True  # and the call that follows finds no GPU
"""
    )
    options = ("-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "tests.gpu.lost_device", "-n", str(processes))
    command = [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    if processes:
        assert "1 failed, 6 passed" in result.stdout  # what the test itself did was right
        assert "crashed while running 'test_it.py::test_it[2]'" in result.stdout
    else:
        assert "the GPU computes no more after test_it.py::test_it[2]" in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="would check the GPU")
def test_without_a_gpu_the_script_says_so(tmp_path: Path) -> None:
    wheels = {"WHEELS": str(tmp_path / "none")}  # those in runs/ may be of another Python
    environment = {"PYTHON": sys.executable, "OUT": str(tmp_path), "PATH": "/usr/bin:/bin", **wheels}
    command = ["tests/gpu/run.sh", "check"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 3
    assert "finds no CUDA device on this machine; nothing was run" in result.stderr
