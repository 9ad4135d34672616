"""Runs the checks of `run.sh`, one after the other, each in a process of its own, until the time is over."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

NO_GPU = 3
FAILED = 1
# Seconds: a job is not started for less.
SHORTEST = 5.0
# Lines of each job's output that are printed; all of them are in $OUT/log.txt.
LINES = 30
ENGINE = ("torch", "transformers", "accelerate", "gguf", "safetensors", "tokenizers", "psutil", "llguidance")
SHARD = (
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "google.protobuf",
    "uvloop",
    "pydantic_settings",
    "opentelemetry.sdk",
)
ROUTER = ("starlette", "uvicorn", "httptools", "jinja2", "msgspec", "prometheus_client")
# `xdist` and `pydantic_settings` are what tests/conftest.py imports.
SUITE = ("pytest", "pytest_asyncio", "pytest_timeout", "xdist", "httpx", "hypothesis", "pydantic_settings")
_TOLD = ("torch", "transformers", "triton", "llguidance", "grpcio", "uvloop", "starlette")


@dataclass(frozen=True, slots=True)
class Job:
    """A command of this interpreter. needs: modules. seconds: it is ended after. lines: of its output are printed.

    variants: of the kernels, which are on.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    seconds: float
    lines: int = LINES
    variants: str = ""


def _out() -> Path:
    folder = Path(os.environ.get("OUT", "runs/gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tests(name: str, seconds: float, *arguments: str, needs: tuple[str, ...] = (), slow: bool = True) -> Job:
    """A job of pytest. slow: it runs the slow tests, too."""
    plugins = ("-p", "no:cacheprovider", "-p", "tests.gpu.lost_device")
    options = (*plugins, "--timeout=200", "-rfE", "--tb=short", *(("--runslow",) if slow else ()))
    return Job(name, ("-m", "pytest", *options, *arguments), (*ENGINE, *SUITE, *needs), seconds)


_UNIT = "tests/unit/engine"
CHECKS = [
    _tests("attention kernels", 200, "tests/gpu/test_attention.py"),
    _tests("sampling: as on a CPU, no waiting", 60, "tests/gpu/test_sampling.py"),
    _tests("engine: chunks, prefix cache, preemption", 60, f"{_UNIT}/test_engine.py"),
    _tests("graphs on and off, no waiting, memory", 150, "tests/gpu/test_decode_graphs.py"),
    _tests("parity per architecture", 200, "tests/gpu/test_models.py"),
    _tests("quantised weights", 100, "tests/gpu/test_quantized.py"),
    _tests("grammars on every path", 60, "tests/unit/grammar/test_model_paths.py"),
    _tests("adapters", 100, f"{_UNIT}/lora", needs=("peft",), slow=False),
    _tests("drafts", 100, f"{_UNIT}/speculation", needs=("peft",), slow=False),
    _tests("lengths that choose frequencies", 60, "tests/unit/engine/backends/test_rope.py"),
    _tests("memory that runs out, a lost device", 60, "tests/gpu/test_faults.py"),
    _tests("the whole server over HTTP", 150, "tests/gpu/test_server.py", needs=SHARD + ROUTER),
]


def _measurement(
    name: str, seconds: float, *arguments: str, needs: tuple[str, ...] = ENGINE, variants: str = ""
) -> Job:
    return Job(name, ("-m", *arguments, f"--output={_out() / name}.json"), needs, seconds, variants=variants)


_SHAPE = ("--batch", "1", "32", "256", "--context=1024", "--prefill-tokens=8192")
_OPT = "runs/synthetic/opt-125m"
BENCHMARKS = [
    _measurement("llama-8b", 300, "benchmarks.engine", "llama-8b", *_SHAPE),
    Job("opt-125m", ("-m", "benchmarks.synthetic", "opt-125m"), ENGINE, 60),
    _measurement(
        "opt-125m-http", 200, "benchmarks.serve", f"--start={_OPT}", "--repeat=200", needs=ENGINE + SHARD + ROUTER
    ),
]


_PARALLEL = ("-n", "12", "--dist", "loadgroup")
_KERNELS = [f"tests/gpu/test_{name}.py" for name in ("attention", "sampling", "quantized", "models", "decode_graphs")]
_OPTIONS_OF_REQUESTS = (f"{_UNIT}/lora", f"{_UNIT}/speculation", "tests/unit/grammar/test_model_paths.py")
# The first run on a new GPU: facts, then correctness on all cores, then speed, then HTTP. Tests that take the whole
# memory run after the others, one by one.
FIRST = [
    Job("facts", ("-m", "tests.gpu.facts"), ENGINE, 150),
    _tests("correctness, on all cores", 240, *_PARALLEL, *_KERNELS, "-m", "not whole_gpu"),
    _tests("adapters, drafts, grammars", 100, *_PARALLEL, *_OPTIONS_OF_REQUESTS, needs=("peft",), slow=False),
    _tests("what takes the whole memory", 60, "tests/gpu", "-m", "whole_gpu"),
    _measurement("llama-8b", 150, "benchmarks.engine", "llama-8b", *_SHAPE, "--profile"),
    _tests("the whole server over HTTP", 120, "tests/gpu/test_server.py", needs=SHARD + ROUTER),
    *BENCHMARKS[1:],
    Job("variants of the kernels", ("-m", "tests.gpu.variants"), ENGINE, 240),
]
# What has changed since the last run on a GPU: speed by kind of weights, the variants to choose from, the router on the
# machine's processors, HTTP, and correctness, which may be cut.
_ONE_ROW = ("--batch", "1", "32", "--context=1024", "--prefill-tokens=8192", "--profile")
_ALL_VARIANTS = "few_rows,attend_in_one,pdl,argmax,rotary,experts"
NEXT = [
    _measurement("llama-8b", 100, "benchmarks.engine", "llama-8b", *_SHAPE, "--profile"),
    _measurement("llama-8b-variants", 60, "benchmarks.engine", "llama-8b", *_ONE_ROW, variants=_ALL_VARIANTS),
    _measurement("llama-8b-pdl", 50, "benchmarks.engine", "llama-8b", *_ONE_ROW[:-1], variants="pdl"),
    _measurement("llama-8b-fp8", 60, "benchmarks.engine", "llama-8b", *_ONE_ROW, "--quantize=fp8"),
    _measurement(
        "llama-8b-fp8-variants", 60, "benchmarks.engine", "llama-8b", *_ONE_ROW, "--quantize=fp8",
        variants=_ALL_VARIANTS,
    ),
    Job("variants to choose from", ("-m", "tests.gpu.variants", "few", "one_kernel", "dependent", "argmax", "latents",
        "experts"), ENGINE, 85),
    _measurement("llama-8b-int4", 80, "benchmarks.engine", "llama-8b", *_ONE_ROW, "--quantize=int4"),
    Job("facts", ("-m", "tests.gpu.facts", "card", "cublas", "latents", "grouped"), ENGINE, 25),
    _measurement("router", 45, "benchmarks.router", "--repeat=2", needs=ENGINE + SHARD + ROUTER),
    BENCHMARKS[1],
    _measurement(
        "opt-125m-http", 60, "benchmarks.serve", f"--start={_OPT}", "--load=W1", "--repeat=100",
        needs=ENGINE + SHARD + ROUTER,
    ),
    _tests("correctness, on all cores", 150, *_PARALLEL, *_KERNELS, "-m", "not whole_gpu"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    state: str
    seconds: float
    detail: str


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh")
    parser.add_argument("what", choices=("first", "next", "check", "bench"))
    parser.add_argument("only", nargs="*", help="part of a name")
    arguments = parser.parse_args()
    jobs = [
        job
        for job in {"first": FIRST, "next": NEXT, "check": CHECKS, "bench": BENCHMARKS}[arguments.what]
        if not arguments.only or any(part in job.name for part in arguments.only)
    ]
    if not jobs:
        parser.error(f"nothing is called {' or '.join(arguments.only)}")
    _tell_machine()
    deadline = time.monotonic() + float(os.environ.get("SECONDS_AT_MOST", "570"))
    results = [run(job, deadline) for job in jobs]
    print("\n" + table(results), flush=True)
    sys.exit(verdict(results))


def run(job: Job, deadline: float) -> Result:
    """Its last lines are printed, and all go into $OUT/log.txt."""
    if missing := [module for module in job.needs if not _there(module)]:
        return Result(job.name, "skipped", 0.0, f"missing: {', '.join(missing)}")
    left = deadline - time.monotonic()
    if left < SHORTEST:
        return Result(job.name, "not run", 0.0, "no time was left")
    print(f"\n== {job.name}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        state = _state(job, output, min(job.seconds, left))
        output.seek(0)
        lines = output.read().strip().splitlines() or ["no output"]
    with (_out() / "log.txt").open("a") as log:
        print(f"\n== {job.name}", *lines, sep="\n", file=log)
    print(*lines[-job.lines :], sep="\n", flush=True)
    summary = next(
        (line for line in reversed(lines) if " passed" in line or " failed" in line or " skipped" in line), ""
    )
    return Result(job.name, state, time.monotonic() - started, summary.strip("= "))


def _state(job: Job, output: TextIO, limit: float) -> str:
    """Runs a job in its own session, so that processes that it leaves are ended with it."""
    process = subprocess.Popen(
        [sys.executable, *job.arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | ({"OATMILL_GPU_VARIANTS": job.variants} if job.variants else {}),
    )  # fmt: skip
    try:
        status = process.wait(limit)
        return "passed" if status == 0 else f"failed ({status})"
    except subprocess.TimeoutExpired:
        return f"failed (not done after {limit:.0f} s)"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def verdict(results: Iterable[Result]) -> int:
    states = [result.state for result in results]
    if any(state.startswith("failed") for state in states):
        return FAILED
    return 0 if "passed" in states else NO_GPU


def table(results: Iterable[Result]) -> str:
    rows = [("what", "result", "seconds", "detail")]
    rows += [(each.name, each.state, f"{each.seconds:.0f}", each.detail) for each in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [[cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)] + [row[3]] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _tell_machine() -> None:
    """Ends the process when there is no GPU."""
    print(", ".join(f"{name} {_version(name)}" for name in _TOLD))
    if not _there("torch"):
        sys.exit("there is no torch: set PYTHON to an interpreter that has it")
    import torch

    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device on this machine; nothing was run", file=sys.stderr
        )
        sys.exit(NO_GPU)
    free, total = torch.cuda.mem_get_info()
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {free >> 20} of {total >> 20} MiB free")
    absent = [module for module in (*ENGINE, *SUITE, *SHARD, *ROUTER) if not _there(module)]
    if absent:
        print(f"missing: {', '.join(absent)}; what needs them is skipped (wheels of them go into runs/wheels)")


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    main()
