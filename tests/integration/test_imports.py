"""What takes seconds to import is imported only where it is needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.processes import die_with_parent
from tests.timing import until
from tgi_server import demo_model

PROGRAMS = (
    "llm_functionalities",
    "tgi_server.launcher.cli",
    "tgi_server.router.cli",
    "tgi_server.benchmark.cli",
    "tgi_server.shard.cli serve",
    "tgi_server.shard.cli download-weights",
    "tgi_server.shard.cli quantize",
)
HEAVY = {"torch", "transformers", "sympy", "starlette", "uvicorn", "huggingface_hub", "opentelemetry.sdk", "setuptools"}
# What the launcher needs only for GGUF files and for several machines. Shards start after its imports.
SOMETIMES = {"tgi_server.launcher.cli": {"numpy", "gguf", "grpc"}}
# The parts of torch and transformers that only training, compiling and other ways to serve need.
NOT_FOR_SERVING = {
    *("torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor", "setuptools", "sympy"),
}


def imported(lines: str) -> set[str]:
    """Returns the modules that are named in what `python -X importtime` writes."""
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)", lines, re.MULTILINE))


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_imports_nothing_heavy(program: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", *program.split(), "--help"]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "--" in process.stdout
    modules = imported(process.stderr)
    assert "pydantic_settings" in modules
    assert not modules & (HEAVY | SOMETIMES.get(program, set()))


@pytest.mark.slow
def test_a_shard_starts_without_what_serving_does_not_need(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["-X", "importtime", "-m", "tgi_server.shard.cli", "serve", str(demo_model.PATH)]
    with log.open("w") as output:
        shard = subprocess.Popen(
            [sys.executable, *command, f"--uds-path={tmp_path}/shard"], stderr=output, preexec_fn=die_with_parent()
        )
    until(lambda: "is ready on" in log.read_text() or shard.poll() is not None, 90)
    shard.terminate()
    assert shard.wait(30) == 0
    modules = imported(log.read_text())
    assert "tgi_server.shard.service" in modules
    assert not modules & NOT_FOR_SERVING


LEAN = """
from tgi_server.shard.lean_imports import lean_imports

with lean_imports():
    import transformers.models as lean
from transformers.utils.import_utils import define_import_structure

found = type(lean)(lean.__name__, lean.__file__, define_import_structure(lean.__file__), module_spec=lean.__spec__)
assert len(dir(found)) > 1000
assert dir(lean) == dir(found)
"""


@pytest.mark.slow
def test_a_shard_knows_all_models_of_transformers() -> None:
    subprocess.run([sys.executable, "-c", LEAN], check=True, timeout=60)
