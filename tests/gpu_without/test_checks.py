"""The code for GPUs, checked on a machine without one: the files `check_*.py` of this folder.

They need Triton and a torch that knows CUDA, so they run in an environment of their own: that of the interpreter that
OATMILL_CUDA_PYTHON names, or one that is made from the package index when it is first needed, and kept. It takes some
six gigabytes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
# The oldest torch and transformers that the engine works with. Triton's interpreter does not know newer numpys.
PACKAGES = ("torch==2.11.0", "transformers==5.17.0", "numpy<2.4", "accelerate", "llguidance", "psutil", "pytest")
SECONDS = 1500
# Files that take longer, and in how many parts they are run.
PARTS = {"check_passes": 3, "check_memory": 3}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture(scope="module")
def python(pytestconfig: pytest.Config) -> str:
    if given := os.environ.get("OATMILL_CUDA_PYTHON"):
        return given
    folder = pytestconfig.rootpath / "runs" / "cuda-environment"
    program, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text() != json.dumps(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        done = subprocess.run(
            [program, "-m", "pip", "install", "--quiet", *PACKAGES], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"the packages cannot be installed here: {done.stderr.strip()[-300:]}")
        ready.write_text(json.dumps(PACKAGES))
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
        "TRITON_INTERPRET": str(int(name != "check_compiled")),
        "OATMILL_PART": part,
        "OMP_NUM_THREADS": "1",  # tensors are tiny, or have no numbers: more threads take six times as long
    }
    options = ("-c", os.devnull, "--rootdir", ROOT, "--noconftest", "--tb=short", "-q", "--import-mode=importlib")
    plugins = ("-p", "no:cacheprovider", "-p", "tests.gpu_without.part")
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
