"""What the server does to a model's numbers costs it little: perplexities on the documents, beside float32."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.models import COPIES, model_path

ROOT = Path(__file__).parents[2]
QUICK_TOKENS, ALL_TOKENS = 2048, 20_000
QUICK_SECONDS, ALL_SECONDS = 1800, 4 * 3600
# The rows of the table, with the row that each is compared with, and how much larger its perplexity may be.
FLOAT32, FILE = "float32", "as it is, bfloat16"
# How much larger it may be where only inputs and activations are rounded. Gemma's differs by up to 0.9 % either way.
INPUTS = {"qwen": 0.003, "gemma": 0.01}
BOUNDS = {
    "as it is, float32": (FLOAT32, 0.001),
    f"{FILE}, KV cache fp8_e4m3fn": (FILE, 0.01),
    f"{FILE}, KV cache fp8_e5m2": (FILE, 0.01),
}
# What the kernels may add to the loss of rounded weights, which products in float32 show.
MORE_BOUNDS = {
    "int8, bfloat16": ("int8, float32", 0.008),
    "fp8, bfloat16": ("fp8, float32", 0.003),
    "int4, bfloat16": ("int4, float32", 0.02),
    "bitsandbytes-nf4, bfloat16": ("bitsandbytes-nf4, float32", 0.03),
}
# What rounding may cost. A model of 270M loses ten times as much as one of 1.5B, in `transformers` as here.
ROUNDINGS = {
    "int8, float32": {"qwen": 0.005, "gemma": 0.01},
    "fp8, float32": {"qwen": 0.02, "gemma": 0.04},
    "int4, float32": {"qwen": 0.05, "gemma": 0.8},
    "bitsandbytes-nf4, float32": {"qwen": 0.05, "gemma": 0.4},
    "GPTQ, bfloat16": {"qwen": 0.05, "gemma": 0.8},
}


@pytest.mark.timeout(ALL_SECONDS)
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_losses_are_bounded(
    name: str, pytestconfig: pytest.Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    full = pytestconfig.getoption("full")
    bounds = BOUNDS | {FILE: (FLOAT32, INPUTS[name])}
    if full:
        bounds |= (
            dict.fromkeys(("bfloat16", "float16"), (FLOAT32, INPUTS[name]))
            | MORE_BOUNDS
            | {row: (FLOAT32, most[name]) for row, most in ROUNDINGS.items()}
        )
    tokens, output = str(ALL_TOKENS if full else QUICK_TOKENS), tmp_path / "table.json"
    options = ("--work", str(COPIES), "--tokens", tokens, "--output", str(output), "--only", *bounds)
    with capfd.disabled():
        subprocess.run(
            [sys.executable, "-m", "benchmarks.perplexity", str(model_path(name)), "--table", *options],
            cwd=ROOT,
            timeout=ALL_SECONDS if full else QUICK_SECONDS,
            check=True,
        )
    found = json.loads(output.read_text())
    assert found.keys() >= bounds.keys()  # a row is left out if the server refuses to run it
    losses = {row: found[row] / found[against] - 1 for row, (against, _) in bounds.items()}
    assert {row: loss for row, loss in losses.items() if loss > bounds[row][1]} == {}
