"""The code for GPUs, checked on a machine without one: the files `check_*.py` of this folder.

They need Triton and a torch that knows CUDA, so they run in two environments of their own: with the oldest versions
that the engine works with, and with those that images have. Each is that of an interpreter that a variable names, or is
made from the package index when it is first needed, and kept; it takes some six gigabytes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
OTHERS = ("accelerate", "gguf", "humming-kernels==0.1.19", "llguidance", "msgspec", "psutil", "pytest")
# `===`: not a torch without CUDA that lies on this machine.
(_SHIPPED,) = re.findall(r"^ARG TORCH=torch==(.+)$", (ROOT / "deploy/docker/tgi.Dockerfile").read_text(), re.MULTILINE)
# What is installed, by the variable that may name an interpreter in its place.
ENVIRONMENTS = {
    "OATMILL_CUDA_PYTHON": ("torch===2.11.0", "transformers==5.17.0", "numpy<2.4", *OTHERS),
    "OATMILL_SHIPPED_CUDA_PYTHON": (f"torch==={_SHIPPED}", "transformers", "numpy", *OTHERS, "-c", "constraints.txt"),
}
# Files that compile for devices; the others run in Triton's interpreter.
COMPILED = ("check_compiled", "check_costs")
SECONDS = 1500
# Files that take longer, and in how many parts they are run.
PARTS = {"check_passes": 3, "check_memory": 3, "check_compiled": 2, "check_shards": 3}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture(scope="module", params=ENVIRONMENTS, ids=["oldest", "shipped"])
def python(request: pytest.FixtureRequest) -> str:
    if given := os.environ.get(request.param):
        return given
    folder = ROOT / "runs" / request.param.lower().replace("_", "-")
    program, ready = folder / "bin" / "python", folder / "ready"
    packages = ENVIRONMENTS[request.param]
    if not ready.exists() or ready.read_text() != json.dumps(packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [program, "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"the packages cannot be installed here: {done.stderr.strip()[-300:]}")
        ready.write_text(json.dumps(packages))
    return str(program)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (path.stem, f"{part}/{PARTS.get(path.stem, 1)}")
        for path in sorted(FOLDER.glob("check_*.py"))
        for part in range(PARTS.get(path.stem, 1))
    ],
)
def test_check(name: str, part: str, python: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": str(int(name not in COMPILED)),
        "OATMILL_PART": part,
        "OMP_NUM_THREADS": "1",  # tensors are tiny, or have no numbers: more threads take six times as long
    }
    options = ("-c", os.devnull, "--rootdir", ROOT, "--noconftest", "--tb=short", "-q", "--import-mode=importlib")
    plugins = ("-p", "no:cacheprovider", "-p", "tests.gpu_without.part", "-p", "tests.gpu_without.bounds")
    done = subprocess.run(
        [python, "-m", "pytest", *options, *plugins, FOLDER / f"{name}.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
