"""The lowest versions that `pyproject.toml` declares are enough."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["engine"]]
LOWEST = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<[\d.]+)?", each).groups() for each in REQUIREMENTS)
# Several gigabytes; tests/gpu_without runs the engine with the lowest of these.
LARGE = ("torch", "transformers", "accelerate")
MODULES = (
    "llm_functionalities.server",
    "tgi_server.launcher.cli",
    "tgi_server.router.cli",
    "tgi_server.router.startup",
    "tgi_server.benchmark.screen",
)
PROGRAMS = ("llm_functionalities", "tgi_server.launcher.cli", "tgi_server.router.cli", "tgi_server.shard.cli serve")


def test_stubs_need_no_more_than_is_declared():
    for stub in (ROOT / "shared" / "stubs").glob("*_pb2*.py"):
        text = stub.read_text()
        needed = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'|Protobuf Python Version: ([\d.]+)", text)
        assert needed is not None, stub.name
        assert (needed[1] or needed[2]) == LOWEST["grpcio" if needed[1] else "protobuf"], stub.name


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a fresh environment with the lowest versions, and nothing else."""
    folder = tmp_path_factory.mktemp("lowest")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet"]
    probe = [*pip, "download", "--no-deps", "--dest", str(folder), f"protobuf=={LOWEST['protobuf']}"]
    if subprocess.run(probe, capture_output=True, timeout=200).returncode != 0:
        pytest.skip("there is no package index here")
    lowest = [f"{name}=={version}" for name, version in LOWEST.items() if name not in LARGE]
    done = subprocess.run([*pip, "install", *lowest], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return pip[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_lowest_versions_can_be_imported_and_read_settings(python: str):
    commands = [["-c", f"import {module}"] for module in MODULES]
    commands += [["-m", *program.split(), "--help"] for program in PROGRAMS]
    for command in commands:
        done = subprocess.run([python, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
