"""Linear layers with weights of 32 and 16 bits against torch in float32, by every kernel of this CPU."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import float as float_module
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.kernel_table import KernelTable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [*range(1, 18), 31, 32, 33, 64, 100, 300]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def kernels_of(dtype: torch.dtype, inputs: int) -> list[str]:
    packed = torch.ops.oatmill.linear_pack(torch.zeros(1, inputs, dtype=dtype))
    return torch.ops.oatmill.linear_kernels(packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (51, 131), (1056, 70), (32, 1600)])
def test_every_kernel_is_the_linear_of_torch_for_any_number_of_rows(dtype, inputs, outputs) -> None:
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    for name in kernels_of(dtype, inputs):
        layer = FloatLinear(weight, bias, KernelTable.of(name))
        for rows in ROWS:
            x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
            wanted = linear(x.float(), weight.float(), bias.float())
            close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
            for actual, expected in (
                (layer(x), wanted),
                (layer.add_to(residual, x), wanted + residual),
            ):
                assert actual.dtype == dtype
                torch.testing.assert_close(actual.float(), expected, **close, msg=lambda text, n=name: f"{n}: {text}")
        torch.testing.assert_close(layer.unpacked().weight, weight)
        torch.testing.assert_close(layer.unpacked().bias, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_may_be_of_another_dtype_than_the_weights(dtype) -> None:
    weight, x = torch.randn(70, 96).to(dtype), torch.randn(5, 96)
    actual = FloatLinear(weight, None, KernelTable.of("fma"))(x)
    torch.testing.assert_close(actual, linear(x, weight.float()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_by_fma_is_the_same_to_the_last_bit_whatever_is_beside_it(dtype) -> None:
    layer = FloatLinear(torch.randn(100, 200).to(dtype), None, KernelTable.of("fma"))
    x = torch.randn(40, 200).to(dtype)
    whole = layer(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13):
        assert torch.equal(layer(x[:rows]), whole[:rows])


# The inputs of the last are cut into passes, since those of all rows would not stay in L2.
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(70, 96, 100), (400, 2048, 160), (90, 8192, 300)])
def test_a_row_by_amx_is_the_same_to_the_last_bit_whatever_is_beside_it(rows, inputs, outputs) -> None:
    named = [name for name in kernels_of(torch.bfloat16, inputs) if name.startswith("amx")]
    if not named:
        pytest.skip("this CPU has no AMX")
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, inputs).bfloat16()
    for name in named:
        layer = FloatLinear(weight, None, KernelTable.of(name))
        whole = layer(x)
        for count in (1, 2, 15, 16, 17, 31, 32, 33, 64, 70):
            assert torch.equal(layer(x[:count]), whole[:count]), (name, count)
        assert torch.equal(layer(x[7:60]), whole[7:60]), name
        if name == "amx_emulated" and "amx" in named:
            real = FloatLinear(weight, None, KernelTable.of("amx"))
            torch.testing.assert_close(whole, real(x), rtol=2e-2, atol=0.1)


_AMX_SCRIPT = """
import os, sys, threading, torch
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.float import FloatLinear
load_kernels()
assert torch.ops.oatmill.isa() == sys.argv[1], torch.ops.oatmill.isa()
torch.ops.oatmill.set_own_threads(2)
torch.manual_seed(0)
layer, x = FloatLinear(torch.randn(500, 256).bfloat16()), torch.randn(40, 256).bfloat16()
whole, found = layer(x), []
thread = threading.Thread(target=lambda: found.append(layer(x)))
thread.start(), thread.join()
assert torch.equal(found[0], whole)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), whole) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

# Refuses what the kernels ask for, Linux's arch_prctl(ARCH_REQ_XCOMP_PERM), as sandboxes and old kernels do.
_REFUSE_AMX = """
import ctypes, struct
def step(code, yes, no, value):
    return struct.pack("HBBI", code, yes, no, value)
program = b"".join([
    step(0x20, 0, 0, 0), step(0x15, 0, 3, 158),  # the number of the call
    step(0x20, 0, 0, 16), step(0x15, 0, 1, 0x1023),  # its first argument
    step(0x06, 0, 0, 0x50001), step(0x06, 0, 0, 0x7FFF0000),
])
buffer = ctypes.create_string_buffer(program)
given = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, given, 0, 0) == 0, ctypes.get_errno()
"""


@pytest.mark.slow
@pytest.mark.parametrize("permitted", [True, False])
def test_amx_is_permitted_in_threads_and_children_or_done_without(permitted) -> None:
    if torch.ops.oatmill.isa() != "amx":
        pytest.skip("this CPU has no AMX")
    script, isa = (_AMX_SCRIPT, "amx") if permitted else (_REFUSE_AMX + _AMX_SCRIPT, "avx512_bf16")
    subprocess.run([sys.executable, "-c", script, isa], check=True)


@pytest.mark.parametrize("rows", [1, 2, 5, 13, 40])
def test_instructions_for_two_rows_add_up_as_those_for_one(rows) -> None:
    if "bf16_mmla" not in kernels_of(torch.bfloat16, 200):
        pytest.skip("this CPU has no bf16_mmla")
    weight, x = torch.randn(100, 200).bfloat16(), torch.randn(rows, 200).bfloat16()
    one, two = (FloatLinear(weight, None, KernelTable.of(name))(x) for name in ("bf16", "bf16_mmla"))
    assert torch.equal(one, two)


def test_the_table_says_which_kernel_computes_how_many_rows() -> None:
    # Kernels for bfloat16 round float32 inputs to it first, so they can be told from the others.
    rounding = [name for name in kernels_of(torch.bfloat16, 64) if not name.startswith("fma")]
    if not rounding:
        pytest.skip("this CPU has no kernel for bfloat16")
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(40, 64)
    few, many = (FloatLinear(weight, None, KernelTable.of(name)) for name in ("fma", rounding[0]))
    mixed = FloatLinear(weight, None, KernelTable.of(f"fma,{rounding[0]}@17"))
    assert not torch.equal(few(x), many(x))
    assert torch.equal(mixed(x[:16]), few(x[:16]))
    assert torch.equal(mixed(x[:17]), many(x[:17]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linears_joined_are_the_linears_side_by_side(dtype) -> None:
    first, second = nn.Linear(48, 32, dtype=dtype), nn.Linear(48, 80, bias=False, dtype=dtype)
    x = torch.randn(3, 48).to(dtype)
    wanted = torch.cat([first.float()(x.float()), second.float()(x.float())], -1)
    first.to(dtype), second.to(dtype)
    joined = FloatLinear.joined(first, second)(x).float()
    torch.testing.assert_close(joined, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_packed_in_parts_is_the_same(dtype, monkeypatch) -> None:
    weight, x = torch.randn(500, 33).to(dtype), torch.randn(3, 33).to(dtype)
    whole = FloatLinear(weight)
    monkeypatch.setattr(float_module, "_NUMBERS_AT_ONCE", 1 << 12)
    assert torch.equal(FloatLinear(weight)(x), whole(x))


def test_what_is_not_a_number_stays_in_its_own_row() -> None:
    layer = FloatLinear(torch.randn(50, 51).bfloat16())
    x = torch.randn(3, 51).bfloat16()
    x[1] = torch.nan
    assert layer(x).isnan().any(1).tolist() == [False, True, False]


def test_memory_of_weights_that_are_gone_goes_back_to_the_system() -> None:
    weight, kept = torch.zeros(1024, 2048, dtype=torch.bfloat16), []
    before = resident_bytes()
    for _ in range(20):
        packed = [torch.ops.oatmill.linear_pack(weight) for _ in range(4)]
        kept.append(packed[0])
    del packed
    # Each that is left may keep two large pages of which it has only a part.
    assert resident_bytes() - before < 2 * sum(tensor.nbytes for tensor in kept)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
