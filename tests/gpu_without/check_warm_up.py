"""Every program that a request may need is compiled by the warm-up; otherwise all running requests wait for it."""

from typing import Any

import pytest
import torch

from tests.gpu_without.fake_gpu import FakeGpu
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine import engine as engine_module
from tgi_server.engine.backends.lora import LoraDelta
from tgi_server.engine.lora.loaded import ReadAdapter
from tgi_server.engine.runners import prompt_graphs
from tgi_server.engine.sampling.choice import MOST_DEMANDING

ROWS, PREFILL = 80, 512
LONG = {"max_position_embeddings": 4 * PREFILL}
SAMPLINGS = [
    SamplingParameters(),
    SamplingParameters(do_sample=True, temperature=0.7, seed=1),
    SamplingParameters(do_sample=True, top_k=20, top_p=0.9, min_p=0.1, seed=1),
    SamplingParameters(do_sample=True, typical_p=0.5, seed=2),
    SamplingParameters(logit_bias={4: 3.0}, min_tokens=3, late_tokens=(2,)),
    MOST_DEMANDING,
]
REPORTS = [ReportParameters(), ReportParameters(logprobs=True), ReportParameters(logprobs=True, top_n_tokens=3)]
PROMPT_REPORT = ReportParameters(logprobs=True, prefill_logprobs=True)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "TOKEN_COUNTS", (32, 64))
    monkeypatch.setattr(engine_module, "_report_prompt", lambda *_: None)  # waits for numbers, in plain torch


def requests(adapter: str) -> list[RunningSequence]:
    """Returns requests that sample and report in all ways; every other one has the adapter."""
    return [
        RunningSequence(
            number,
            [3] * (1 + 7 * (number % 12)),
            StoppingParameters(400, ignore_eos=True),
            SAMPLINGS[number % len(SAMPLINGS)],
            REPORTS[number % len(REPORTS)],
            blocks=[1, 2, 3],
            adapter_id=adapter if number % 2 else "",
        )
        for number in range(ROWS - 2)
    ]


def serve(engine: Engine, adapter: str = "") -> None:
    """Starts steps with prompts short and long, alone and beside rows that decode, and without prompts."""
    longest = 4 * PREFILL
    for start, size in ((0, longest), (1, 1)):
        blocks = [1] * (longest // engine.info.block_size)
        text = RunningSequence(1000 + start, [3] * size, StoppingParameters(9), report=PROMPT_REPORT, blocks=blocks)
        for first in range(0, size, PREFILL):
            engine.step(1, [text] if first == 0 else [], [(text.request_id, min(PREFILL, size))])
        engine.step(1)
    waiting = requests(adapter)
    while waiting:
        joining, waiting = waiting[:6], waiting[6:]
        engine.step(1, joining, [(request.request_id, len(request.input_ids)) for request in joining])
        engine.step(1)
    for left in (64, 30, 7, 2, 1):
        engine.keep(1, range(left))
        engine.step(1)
    engine.clear()


def names(programs: set[tuple[Any, ...]]) -> str:
    return "\n".join(sorted(str(program) for program in programs))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("opt", {}),
        ("gemma2", {}),
        ("mixtral", {"dtype": torch.float16}),  # in which the engine's own kernel multiplies by experts
        ("llama", {"quantized": "int4"}),
        ("llama", {"quantized": "fp8"}),
        ("opt", {"quantized": "int4"}),
        ("mixtral", {"quantized": "int4"}),
        ("llama", {"vocab_size": 203}),
        ("deepseek_v3", {}),
    ],
)
def test_steps(architecture: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGpu(monkeypatch) as gpu:
        engine = gpu.engine(gpu.model(architecture, **LONG, **settings), cuda_graphs=(2, 64))
        engine.warm_up(ROWS, PREFILL, max_total_tokens=4 * PREFILL)
        known = set(gpu.programs)
        serve(engine)
        assert not gpu.programs - known, names(gpu.programs - known)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
@pytest.mark.parametrize("early", [True, False])
def test_adapters(architecture: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there before the warm-up, and those for which memory is left."""
    with FakeGpu(monkeypatch) as gpu:
        engine = gpu.engine(gpu.model(architecture, **LONG), cuda_graphs=(2, 64))
        if early:
            put(engine)
        engine.warm_up(ROWS, PREFILL, max_total_tokens=4 * PREFILL, adapter_bytes=0 if early else 1 << 20)
        known = set(gpu.programs)
        if not early:
            put(engine)
        serve(engine, "a")
        assert not gpu.programs - known, names(gpu.programs - known)
        assert any(name == "_expand" for name, *_ in known)


def test_adapters_lie_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels find their matrices by address: one of the host's memory is an illegal access, which ends the process."""
    with FakeGpu(monkeypatch) as gpu:
        engine = gpu.engine(gpu.model("llama"))
        put(engine)
        for linear in engine.adapters._linears:
            tensors = linear._backend._deltas[1]  # type: ignore[attr-defined]
            assert {tensor.device.type for tensor in tensors if tensor is not None} == {"cuda"}


def put(engine: Engine) -> None:
    """Loads an adapter of rank 8 from the host's memory; it changes every linear layer."""
    changes = {}
    for place, linear in enumerate(engine.adapters._linears):
        a, b = torch.empty(8, linear.inputs), torch.empty(8, linear.outputs)
        changes[place] = LoraDelta(a, [b], [0], torch.empty(linear.outputs), None)
    engine.adapters.put("a", ReadAdapter(8, changes))


def test_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGpu(monkeypatch) as gpu:
        engine = gpu.engine(gpu.model("llama", **LONG), cuda_graphs=(2, 64), speculate=3)
        engine.warm_up(ROWS, PREFILL, max_total_tokens=4 * PREFILL)
        known = set(gpu.programs)
        with torch.inference_mode():
            for rows in (2, 64, ROWS):
                engine._runner.forward_drafts(rows, [(row, torch.full((2,), 3)) for row in range(rows)])
        serve(engine)
        assert not gpu.programs - known, names(gpu.programs - known)
