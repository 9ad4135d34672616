"""Kernels that are compiled for other kinds of CPUs than this one."""

import logging
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.user_cache import user_cache
from tgi_server.engine.kernels import __main__ as command
from tgi_server.engine.kernels import build
from tgi_server.engine.progress import report_to
from tgi_server.loading import COMPILING

FEATURES = {
    "a first x86-64": "fpu sse sse2",
    "Nehalem": "sse2 ssse3 sse4_1 sse4_2 popcnt cx16",
    "Zen 3": "sse2 ssse3 sse4_1 sse4_2 popcnt cx16 avx avx2 fma f16c bmi1 bmi2 movbe abm",
    "Ice Lake": "avx2 fma f16c bmi1 bmi2 movbe abm avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni",
    "Sierra Forest": "avx2 fma f16c bmi1 bmi2 movbe abm adx rdseed sha_ni avx_vnni gfni vaes vpclmulqdq movdiri "
    "movdir64b",
    "Graviton": "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid",
    "Graviton2": "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
    "Graviton3": "fp asimd crc32 atomics fphp asimdhp cpuid asimdrdm asimddp sve asimdfhm svei8mm svebf16 i8mm bf16",
}
BEST = {"a first x86-64": None, "Nehalem": "x86-64-v2", "Zen 3": "x86-64-v3", "Ice Lake": "cascadelake",
        "Sierra Forest": "alderlake"}  # fmt: skip
ARM_BEST = {"Graviton": "armv8-a", "Graviton2": "armv8.2-a+dotprod", "Graviton3": "armv8.2-a+dotprod+bf16+i8mm"}

X86 = pytest.mark.skipif("x86-64-v2" not in build.TARGETS, reason="the targets are those of x86-64")


@pytest.mark.parametrize("machine", FEATURES)
def test_the_best_of_the_compiled_libraries_is_taken(machine, tmp_path, monkeypatch) -> None:
    best = (BEST | ARM_BEST)[machine]
    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setattr(build, "TARGETS", build.ARM_TARGETS if machine in ARM_BEST else build.X86_TARGETS)
    monkeypatch.setattr(build, "_cpu_features", lambda: FEATURES[machine])
    for target in build.TARGETS:
        build._library(target).touch()
    assert build.compiled_library() == (None if best is None else build._library(best))
    build._library(build.NATIVE).touch()
    assert build.compiled_library() == build._library(build.NATIVE)


def test_an_unknown_target_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", "x86-64-v9"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert "no such target: x86-64-v9" in capsys.readouterr().err


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only makes its output, and a cache of its own. Returns the file that counts its calls."""
    program, calls = tmp_path / "bin" / "g++", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nfor output; do :; done\necho "$output" >> {calls}\n: > "$output"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build, "CACHE", tmp_path / "home" / ".cache" / "oatmill" / "kernels")
    return calls


def test_the_log_says_how_far_compiling_is(compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert build.prepare(["x86-64-v3"])
    assert build._library("x86-64-v3").exists()
    files = len(build.SOURCES)
    assert all(f"compiled {done} of {files} files" in caplog.text for done in range(1, files + 1)), caplog.text


def calls(compiler: Path) -> int:
    """Returns how often the compiler has been called since the last time."""
    count = len(compiler.read_text().splitlines()) if compiler.exists() else 0
    compiler.unlink(missing_ok=True)
    return count


def test_what_a_broken_off_compilation_has_done_is_not_done_again(compiler: Path) -> None:
    assert build.prepare(["x86-64-v3"])
    assert calls(compiler) == len(build.SOURCES) + 1
    objects = list((build.CACHE / "objects").iterdir())
    build._library("x86-64-v3").unlink()
    for compiled in objects[2:4]:
        compiled.unlink()
    assert build.prepare(["x86-64-v3"])
    assert calls(compiler) == 3  # two sources and the library
    assert sorted((build.CACHE / "objects").iterdir()) == sorted(objects)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two sources, of which one includes a header of the other's header."""
    folder = tmp_path / "cpu"
    (folder / "gemm").mkdir(parents=True)
    texts = {"gemm/a.cpp": '#include "gemm/a.h"', "b.cpp": '#include "b.h"', "gemm/a.h": '#include "b.h"', "b.h": ""}
    for name, text in texts.items():
        (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setattr(build, "SOURCES", sorted(folder.rglob("*.cpp")))
    monkeypatch.setattr(build, "HEADERS", sorted(folder.rglob("*.h")))
    monkeypatch.setattr(build, "_hash_of_sources", build._hash_of_sources.__wrapped__)
    return folder


def test_only_what_a_change_concerns_is_compiled_again(compiler: Path, sources: Path) -> None:
    def compiled() -> int:
        assert build.prepare(["x86-64-v3"])
        return calls(compiler)

    assert compiled() == 3  # both sources and the library
    assert compiled() == 0
    for name, count in {"gemm/a.cpp": 2, "gemm/a.h": 2, "b.h": 3, "b.cpp": 2}.items():
        before = (sources / name).read_text()
        (sources / name).write_text(f"{before}// a comment\n")
        assert compiled() == count, name
        (sources / name).write_text(before)
        assert compiled() == 0, name
    assert build.prepare(["x86-64-v2"])
    assert calls(compiler) == 3


def test_the_limit_of_a_compilation_is_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that waits for a busy machine goes on; one that never ends is stopped."""
    monkeypatch.setattr(build, "COMPILE_SECONDS", 1)
    build._run(["sleep", "1.5"])
    with pytest.raises(OSError, match="sh failed"):
        build._run(["sh", "-c", "while :; do :; done"])


def test_the_cache_is_bounded(compiler: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_LIBRARIES", 2)
    monkeypatch.setattr(build, "_OBJECTS", 3)
    found = []
    for number in range(4):
        (sources / "b.cpp").write_text(f"// {number}\n")
        assert build.prepare(["x86-64-v3"])
        found.append(build._library("x86-64-v3"))
        build.CACHE.joinpath(f"{found[-1].stem}-choice").touch()
        time.sleep(0.01)  # so that their times differ
    assert sorted(build.CACHE.glob("*.so")) == sorted(found[2:])
    assert sorted(build.CACHE.glob("*-choice")) == sorted(each.with_name(f"{each.stem}-choice") for each in found[2:])
    assert len(list((build.CACHE / "objects").iterdir())) == 3
    compiler.unlink()
    (sources / "b.cpp").write_text("// 3, again\n")
    assert build.prepare(["x86-64-v3"])
    assert calls(compiler) == 2  # the other source's object is as new as its last use


def test_kernels_of_a_user_with_a_read_only_home_outlive_the_process(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    temporary, stages = tmp_path / "oatmill-0", []
    monkeypatch.setattr(build, "CACHE", Path("/proc/oatmill"))
    monkeypatch.setattr(build, "TEMPORARY", temporary)
    report_to(lambda stage, fraction: stages.append((stage, fraction)))
    try:
        assert not build.compile_beside()
        assert build.prepare([build.NATIVE])
    finally:
        report_to(None)
    library = build.compiled_library()
    assert library is not None
    assert library.parent == temporary
    assert f"/proc/oatmill cannot be written to, so the CPU kernels are kept in {temporary}; set XDG_" in caplog.text
    assert (stages[0], stages[-1]) == ((COMPILING, 0.0), (COMPILING, 1.0))
    temporary.chmod(0o777)
    assert build.compiled_library() != library  # others may have written it


def test_a_user_without_a_home_may_name_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert not build._is_writable(user_cache())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "oatmill"


def test_a_server_need_not_wait_for_the_compiler(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compiles_beside", False)
    assert build.compile_beside()
    assert not build.load_kernels.__wrapped__()
    deadline = time.monotonic() + 100
    while build.compiled_library() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not build.compile_beside()  # the next start finds them


def test_compiled_kernels_may_come_as_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / build.PACKAGE
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    assert build.compiled_library() is None
    for target in build.TARGETS:
        build._library(target, package).touch()
    assert build.compiled_library() in package.iterdir()


@X86
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["x86-64-v2", "ivybridge", "x86-64-v3"])
def test_kernels_for_older_cpus_compute_the_same(target) -> None:
    """Ivy Bridge has AVX and F16C, but not AVX2."""
    if not build.TARGETS.get(target, build.TARGETS["x86-64-v3"]) <= set(build._cpu_features().split()):
        pytest.skip(f"this CPU is older than {target}")
    script = f"""
import pytest, sys
from tgi_server.engine.kernels import build
build.NATIVE = {target!r}
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit/engine/linear", "tests/unit/engine/backends",
                      "tests/unit/engine/kernels/cpu", "tests/unit/engine/backends/attention/test_backends.py"]))
"""
    assert build.prepare([target])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernel_for_amx_computes_the_same_with_emulated_tiles() -> None:
    script = """
import pytest, sys
from tgi_server.engine.kernels import build
build.FLAGS.append("-DOATMILL_EMULATED_TILES")
assert build.load_kernels()
import torch
assert "amx_emulated" in torch.ops.oatmill.linear_kernels(torch.ops.oatmill.linear_pack(torch.zeros(1, 64).bfloat16()))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit/engine/linear",
                      "tests/unit/engine/backends/test_head.py",
                      "tests/unit/engine/backends/attention/test_backends.py"]))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]


@X86
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["skylake-avx512", "cascadelake", "cooperlake", "sapphirerapids"])
def test_kernels_compile_for_newer_cpus(target, tmp_path) -> None:
    library = tmp_path / "kernels.so"
    build._compile(library, target)
    assert library.stat().st_size > 0


@X86
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs Debian's qemu-user")
def test_the_oldest_cpu_that_is_served_runs_everything(tmp_path) -> None:
    """Runs in an emulated CPU that has x86-64-v2 and nothing more: what needs newer instructions ends by a signal."""
    script = f"""
from pathlib import Path
import torch
import llm_functionalities.cli, tgi_server.launcher.cli, tgi_server.router.cli, tgi_server.shard.cli
from tgi_server import demo_model
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.kernels import build, load_kernels
from tgi_server.engine.offline import generate

build.CACHE = Path({str(tmp_path)!r})
build._cpu_features = lambda: {FEATURES["Nehalem"]!r}  # /proc/cpuinfo is that of the real CPU
assert load_kernels() and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
for dtype in (torch.float32, torch.bfloat16):
    engine = Engine(EngineConfig(demo_model.PATH, dtype=dtype))
    tokens = generate(engine, [list(range(5, 40)), [8, 9]], StoppingParameters(4, ignore_eos=True))
    assert [len(each) for each in tokens] == [4, 4], tokens
"""
    build._compile(tmp_path / f"{build._key('x86-64-v2')}.so", "x86-64-v2")
    command = ["qemu-x86_64", "-cpu", "Nehalem-v1", sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
