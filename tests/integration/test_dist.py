"""A release, built and installed as strangers do: from an index, into an environment of its own, without a compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tgi_server.engine.kernels import build

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def make_release() -> None:
    features = set(build._cpu_features().split())
    run(sys.executable, "-m", "tools.dist", next(name for name, needed in build.TARGETS.items() if needed <= features))


@pytest.fixture(scope="module")
def dist() -> Path:
    """The folder of a release whose kernels are for this kind of CPU alone."""
    make_release()
    return ROOT / "dist"


def test_a_release_has_sums_and_a_bill_of_materials(dist: Path):
    sums = dict(reversed(line.split()) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() | {"SHA256SUMS"} == {file.name for file in dist.iterdir()}
    bill = json.loads(next(dist.glob("*.cdx.json")).read_text())
    packages = {each["name"]: each["version"] for each in bill["components"]}
    assert packages["torch"] == torch.__version__
    assert "grpcio" in packages
    assert "pytest" not in packages


def test_the_same_commit_gives_the_same_wheel(dist: Path):
    before = {file.name: file.read_bytes() for file in dist.glob("*.whl")}
    make_release()
    assert {file.name: file.read_bytes() for file in dist.glob("*.whl")} == before


def test_a_fresh_environment_without_a_compiler_has_fast_kernels(dist: Path, tmp_path: Path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    binaries = tmp_path / "venv" / "bin"
    pip = (binaries / "python", "-m", "pip", "install", "--quiet")
    release = torch.__version__.partition("+")[0]
    run(*pip, f"torch=={release}")
    run(*pip, "--find-links", dist, "-c", ROOT / "constraints.txt", "oatmill[server]")
    bare = {"HOME": str(tmp_path), "PATH": str(binaries)}
    doctor = run(binaries / "oatmill", "doctor", **bare)
    assert f"site-packages/{build.PACKAGE}/" in doctor
    demo = run(binaries / "oatmill", "demo", **bare)
    assert "stopped: all calls were answered" in demo
