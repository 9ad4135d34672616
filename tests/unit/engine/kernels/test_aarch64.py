"""The kernels for aarch64: compiled for each kind, and run on emulated CPUs where tests/aarch64.sh has made a folder.

Emulated threads and system calls are slow and speed says nothing; results are those of the instructions.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tgi_server.engine.kernels import build

ROOT = Path(__file__).parents[4]
COMPILER = "aarch64-linux-gnu-g++"
MACHINE = Path(os.environ.get("OATMILL_AARCH64", ROOT / "runs" / "aarch64"))
# Each with what Linux tells of it, its identification register, and the target that it takes of all that are compiled.
CPUS = {
    "cortex-a72": ("fp asimd crc32 cpuid", 0x410FD083, "armv8-a"),
    "neoverse-n1": ("fp asimd crc32 atomics fphp asimdhp cpuid asimdrdm asimddp", 0x413FD0C1, "armv8.2-a+dotprod"),
    "max": ("fp asimd crc32 atomics fphp asimdhp cpuid asimdrdm asimddp sve i8mm bf16", 0x411FD401,
            "armv8.2-a+dotprod+bf16+i8mm"),
}  # fmt: skip
INSTRUCTIONS = {"cortex-a72": set(), "neoverse-n1": {"int8"},
                "max": {"int8", "bf16", "bf16_mmla", "int8_mmla"}}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not shutil.which(COMPILER), reason="needs Debian's g++-aarch64-linux-gnu"),
]
emulated = pytest.mark.skipif(
    not shutil.which("qemu-aarch64") or not (MACHINE / "site" / "torch").exists(),
    reason="needs Debian's qemu-user, and the folder that tests/aarch64.sh makes",
)

TESTS = ["linear/test_float.py", "linear/test_int8.py", "linear/test_quantized.py", "backends/test_head.py",
         "attention/test_backends.py", "kernels/cpu/ops/test_norm_rope_gate.py", "kernels/cpu/gemm/test_lora.py",
         "kernels/cpu/gemm/test_moe.py"]  # fmt: skip

RUN = """
import os, sys, pytest
from pathlib import Path
from tgi_server.engine.kernels import build

os.cpu_count = lambda: 2
build.CACHE, libraries, wanted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
for target in build.TARGETS:
    build._library(target).symlink_to(libraries / f"{target}.so")
assert build.compiled_library() == build._library(wanted), build.compiled_library()
if sys.argv[4:]:
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--timeout", "7200", *sys.argv[4:]]))

import torch
from transformers import AutoModelForCausalLM
from tgi_server import demo_model
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.offline import generate

assert build.load_kernels()
weights = [torch.zeros(1, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.int8)]
packed = [torch.ops.oatmill.linear_pack(each) for each in weights]
names = {name for each in packed for name in torch.ops.oatmill.linear_kernels(each)}
print(*sorted(names - {"fma", "fma_dequant", "int16"}))
prompts = [list(range(5, 40)), [8, 9]]
for dtype in (torch.float32, torch.bfloat16):
    engine = Engine(EngineConfig(demo_model.PATH, dtype=dtype))
    tokens = generate(engine, prompts, StoppingParameters(4, ignore_eos=True))
    assert [len(each) for each in tokens] == [4, 4], tokens
    if dtype is torch.float32:
        model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=dtype)
        model.generation_config.eos_token_id = None
        for prompt, actual in zip(prompts, tokens, strict=True):
            ids = torch.tensor([prompt])
            wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
            assert wanted[0, len(prompt) :].tolist() == actual
"""


@pytest.mark.parametrize("source", build.SOURCES, ids=lambda source: source.stem)
@pytest.mark.parametrize("target", build.ARM_TARGETS)
def test_kernels_compile(target, source, tmp_path) -> None:
    build._run(build.command(COMPILER, target, source, tmp_path / "kernel.o"))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels for each kind of aarch64 CPU, as a container image has them."""
    folder, torch_folder = tmp_path_factory.mktemp("libraries"), MACHINE / "site" / "torch"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "which", lambda _: COMPILER)
        patch.setattr(cpp_extension, "include_paths", lambda: [torch_folder / "include"])
        patch.setattr(cpp_extension, "library_paths", lambda: [torch_folder / "lib"])
        for target in build.ARM_TARGETS:
            build._compile(folder / f"{target}.so", target)
    return folder


def system_of(cpu: str, folder: Path) -> Path:
    """Makes the root of a system whose files tell of this CPU, where programs would find those of the real one."""
    features, register, _ = CPUS[cpu]
    for part in (MACHINE / "root").iterdir():
        if part.name in ("bin", "etc", "lib", "usr"):
            (folder / part.name).symlink_to(part)
    (folder / "proc").mkdir()
    processors = [
        f"processor\t: {i}\nFeatures\t: {features}\nCPU architecture: 8\n" for i in range(os.cpu_count() or 1)
    ]
    identity = {"implementer": register >> 24, "variant": register >> 20 & 15, "part": register >> 4 & 0xFFF}
    lines = "".join(f"CPU {name}\t: {number:#x}\n" for name, number in identity.items())
    (folder / "proc" / "cpuinfo").write_text("\n".join(f"{each}{lines}CPU revision\t: 1\n" for each in processors))
    for i in range(len(processors)):
        identification = folder / f"sys/devices/system/cpu/cpu{i}/regs/identification"
        identification.mkdir(parents=True)
        (identification / "midr_el1").write_text(f"{register:#018x}\n")
    return folder


def run_on(cpu: str, libraries: Path, tmp_path: Path, *tests: str) -> str:
    """Runs tests, or else the demo model, on an emulated CPU. Returns what was printed."""
    system, cache = tmp_path / "system", tmp_path / "cache"
    system.mkdir(), cache.mkdir()
    command = ["qemu-aarch64", "-cpu", cpu, "-L", str(system_of(cpu, system)), str(MACHINE / "root/usr/bin/python3.11")]
    result = subprocess.run(
        [*command, "-c", RUN, str(cache), str(libraries), CPUS[cpu][2], *tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{MACHINE / 'site'}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return result.stdout


@emulated
@pytest.mark.parametrize("cpu", CPUS)
def test_the_best_kernels_run_the_demo_model_as_transformers_does(cpu, libraries, tmp_path) -> None:
    """The CPU of an older kind, too, takes those that it can run of an image that has them for all kinds."""
    assert set(run_on(cpu, libraries, tmp_path).split()) == INSTRUCTIONS[cpu]


@emulated
@pytest.mark.parametrize("tests", TESTS)
@pytest.mark.parametrize("cpu", list(CPUS)[1:])  # PyPI's torch computes what tests compare with by newer instructions
def test_kernels_compute_the_same(cpu, tests, libraries, tmp_path) -> None:
    run_on(cpu, libraries, tmp_path, f"tests/unit/engine/{tests}")
