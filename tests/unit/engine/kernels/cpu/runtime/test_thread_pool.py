"""The threads that share the items of a kernel: whoever calls, and however many they are, results are the same."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tgi_server.engine.kernels import load_kernels, structure
from tgi_server.engine.linear.float import FloatLinear

# Members of a pass that always are there.
TENSORS = ("tokens", "positions", "slots", "tables", "kv_lengths", "query_starts")
# A process that has used its threads forks; its child, which has none of them, computes as well.
_FORKS = f"""
TENSORS = {TENSORS}
import os, torch
from tgi_server.engine.kernels import load_kernels, structure
load_kernels()
from tgi_server.engine.linear.float import FloatLinear
none = torch.zeros(1, dtype=torch.int64)
decoder = torch.classes.oatmill.Decoder("relu", False, False, 1.0, False, None)
head = FloatLinear(torch.ones(16, 16)).kernel()
embedding = torch.classes.oatmill.Embedding(torch.ones(16, 16), None, 1.0)
model = torch.classes.oatmill.CausalLM(structure("ModelModules", decoder=decoder, embedding=embedding, head=head))
model.forward(structure("PassInput", **dict.fromkeys(TENSORS, none)))
torch.set_num_threads(3)
x, weight = torch.randn(512, 256), torch.ones(256)
expected = torch.ops.oatmill.rms_norm(x, weight, 1e-5)
child = os.fork()
same = torch.equal(torch.ops.oatmill.rms_norm(x, weight, 1e-5), expected)
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    none = torch.zeros(1, dtype=torch.int64)
    decoder = torch.classes.oatmill.Decoder("relu", False, False, 1.0, False, None)
    head = FloatLinear(torch.ones(16, 16)).kernel()
    embedding = torch.classes.oatmill.Embedding(torch.ones(16, 16), None, 1.0)
    model = torch.classes.oatmill.CausalLM(structure("ModelModules", decoder=decoder, embedding=embedding, head=head))
    # The process has threads of its own once it has run.
    model.forward(structure("PassInput", **dict.fromkeys(TENSORS, none)))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_results_are_the_same_on_any_number_of_threads(threads) -> None:
    x, weight = torch.randn(512, 256), torch.ones(256)
    results = []
    for count in (1, 4, 2, 3, 1):
        threads(count)
        results += [torch.ops.oatmill.rms_norm(x, weight, 1e-5) for _ in range(50)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_several_callers_at_once(threads) -> None:
    weight = torch.ones(256)
    inputs = [torch.randn(512, 256) for _ in range(6)]
    expected = [torch.ops.oatmill.rms_norm(x, weight, 1e-5) for x in inputs]

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        torch.set_num_threads(3)  # of the thread that calls
        return [torch.ops.oatmill.rms_norm(x, weight, 1e-5) for _ in range(50)]

    with ThreadPoolExecutor(len(inputs)) as callers:
        for results, right in zip(callers.map(compute, inputs), expected, strict=True):
            assert all(torch.equal(result, right) for result in results)


@pytest.mark.slow
def test_a_child_computes_with_threads_of_its_own() -> None:
    ended = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
