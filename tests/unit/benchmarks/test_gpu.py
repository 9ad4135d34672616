"""What measures and checks on a GPU, as far as it runs without one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_points, large_model
from benchmarks.floor import Machine
from benchmarks.gpu import main, row, with_peer
from benchmarks.gpu_points import Load, Point
from tests.gpu import run as script
from tests.gpu.run import Job, Result

CPU = torch.device("cpu")
MACHINE = Machine(bandwidth=1e9, matrix_rate=1e12)


def test_a_models_shape_is_that_of_its_layers() -> None:
    shape = large_model.shape_of(large_model.build(large_model.SMALL, CPU, torch.bfloat16))
    layers = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128)
    assert shape.cost.weight_bytes == 2 * (layers + 512 * 64)
    assert (shape.cost.layer_flops, shape.cost.head_flops) == (2 * layers, 2 * 512 * 64)
    assert (shape.kv_bytes, shape.attention_flops) == (2 * 2 * 2 * 16 * 2, 4 * 2 * 4 * 16)


def test_the_floor_of_a_mix_is_prompts_and_then_passes() -> None:
    shape = large_model.shape_of(large_model.build(large_model.SMALL, CPU, torch.bfloat16))
    load = Load(context=10, requests=2, new_tokens=5)
    reading = (shape.cost.weight_bytes + 2 * 12.5 * shape.kv_bytes) / 1e9
    prompts = 2 * (10 * shape.cost.layer_flops + shape.cost.head_flops + shape.attention_flops * 50) / 1e12
    assert gpu_points.mix_floor(shape, MACHINE, load) == pytest.approx(prompts + 4 * reading)


def test_all_points_are_measured(monkeypatch, capsys, tmp_path: Path) -> None:
    output = tmp_path / "points.json"
    arguments = ["gpu", "--small", "--device", "cpu", "--no-peer", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("benchmarks.gpu.measure_machine", lambda *_: MACHINE)
    main()
    points = json.loads(output.read_text())
    assert len(points) == 4
    assert all(point["ours"] > 0 and point["floor"] > 0 for point in points)
    assert "prefill of 256 tokens" in capsys.readouterr().out


def test_a_point_is_met_when_all_that_is_asked_for_is() -> None:
    point = Point("it", "s", ours=2.0, peer=None, floor=1.5, value=1.4, target=1.5, lower=True, times_peer=2.0)
    assert point.met
    assert not with_peer(point, 3.9).met
    assert with_peer(point, 4.0).met
    assert not replace(point, value=1.6).met
    assert replace(point, value=1.6, lower=False).met
    assert row(with_peer(point, 4.0))[-1] == "yes"


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
    for job in script.CHECKS:
        assert all(Path(part).exists() for part in job.arguments if part.startswith("tests/")), job.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="would check the GPU")
def test_without_a_gpu_the_script_says_so(tmp_path: Path) -> None:
    wheels = {"WHEELS": str(tmp_path / "none")}  # those in runs/ may be of another Python
    environment = {"PYTHON": sys.executable, "OUT": str(tmp_path), "PATH": "/usr/bin:/bin", **wheels}
    command = ["tests/gpu/run.sh", "check"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 3
    assert "finds no CUDA device on this machine; nothing was run" in result.stderr
