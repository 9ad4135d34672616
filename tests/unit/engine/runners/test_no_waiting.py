"""What a GPU's host would wait for in a step, and what would not be the same in each: found on a CPU, by operation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import ARCHITECTURES, HYBRIDS, make
from tests.unit.engine.requests import load_engine, prompts
from tests.unit.engine.runners.test_parity import ELSEWHERE, PADDED
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.captured_steps import StepCapture
from tgi_server.engine.runners.prompt_graphs import PromptGraphs

# Operations whose result, or its size, the host has to know.
WAITING = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "bincount")
# Models that look at what the device computes, some in some versions of `transformers` only: they decode without CUDA
# graphs.
WAITS = {"gpt2", "gemma3n_text", "kimi_linear"}
WAITS |= {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"}
QUICK = {"llama", "opt", "gemma2"}
PAGED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(ARCHITECTURES.keys() - ELSEWHERE - PADDED)
]
CAPTURED = [each for each in PAGED if each.values[0] not in WAITS]
# Prompts of a model with states are not captured.
WITH_PROMPTS = [each for each in CAPTURED if each.values[0] not in HYBRIDS]
SAMPLING = [
    SamplingParameters(),
    SamplingParameters(do_sample=True, temperature=0.7, top_k=20, top_p=0.9, seed=1),
    SamplingParameters(do_sample=True, typical_p=0.7, min_p=0.01, seed=2, watermark=True),
    SamplingParameters(
        repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, count_penalty=0.5, logit_bias={4: 3.0}
    ),
]


class Operations(TorchDispatchMode):
    """The operations of a step, each with the places of those of its inputs that were there before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        self.waiting: set[str] = set()
        self._made: set[int] = set()
        self._kept: list[Any] = []  # so that no place is given twice

    def __enter__(self) -> Self:
        self._tolist = Tensor.tolist
        Tensor.tolist = lambda tensor: self.waiting.add("tolist") or self._tolist(tensor)  # no operation of torch's
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Tensor.tolist = self._tolist
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = operation.name().removeprefix("aten::").partition(".")[0]
        inputs = [each for each in torch.utils._pytree.tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        by_mask = name.startswith("index") and any(each.dtype is torch.bool for each in inputs[1:])
        if name in WAITING or by_mask:
            self.waiting.add(name)
        places = self.note(name, inputs)
        result = operation(*arguments, **(options or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in places:
                self._made.add(each.untyped_storage().data_ptr())
                self._kept.append(each)
        return result

    def note(self, name: str, inputs: list[Tensor]) -> tuple[int, ...]:
        """Notes an operation. Returns the places of those of its inputs that were there before the step."""
        places = tuple(
            place for each in inputs if (place := each.untyped_storage().data_ptr()) not in self._made and place
        )
        self.seen.append((name, places))
        return places


def started(folder: Path) -> Engine:
    engine = load_engine(folder, custom_kernels=False)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
    return engine


def joining(lengths: tuple[int, ...], first_block: int = 1) -> tuple[list[RunningSequence], list[tuple[int, int]]]:
    """Returns sequences with their blocks, and the chunks that complete their prompts."""
    sequences = [
        RunningSequence(
            first_block + index,
            text,
            StoppingParameters(50, ignore_eos=True),
            SAMPLING[index % len(SAMPLING)],
            ReportParameters(logprobs=index % 2 == 1, top_n_tokens=index % 3),
            blocks=list(range(1 + 8 * index + first_block, 9 + 8 * index + first_block)),
        )
        for index, text in enumerate(prompts(lengths))
    ]
    return sequences, [(each.request_id, len(each.input_ids)) for each in sequences]


@pytest.mark.parametrize("architecture", PAGED)
def test_a_step_looks_at_nothing_that_it_computes(architecture: str, tmp_path: Path) -> None:
    engine = started(make(architecture, tmp_path))
    engine.step(1, *joining((5, 20, 9, 3))).collect()
    with Operations() as operations:
        engine.step(1, *joining((17,), first_block=40))
        engine.step(1)
    assert not operations.waiting or architecture in WAITS, operations.waiting


@pytest.mark.parametrize("look", [Tensor.item, lambda x: x.tolist(), bool, lambda x: x[x > 0], lambda x: 1.0 in x])
def test_what_waits_is_noticed(look: Callable[[Tensor], Any]) -> None:
    with torch.inference_mode(), Operations() as operations:
        look(torch.ones(1))
    assert operations.waiting


@pytest.mark.parametrize("architecture", CAPTURED)
def test_decoding_is_the_same_work_in_the_same_places(architecture: str, tmp_path: Path) -> None:
    """As CUDA graphs have it, the choice of the next inputs included."""
    engine = started(make(architecture, tmp_path))
    runner: Any = engine._runner
    runner.model.attention.attend = attend_nothing
    capture = StepCapture(runner._batch, runner.model.forward, lambda step: step, None, {})
    runs = []
    for lengths in ((5, 20, 9), (33, 2, 40)):
        engine.clear()
        engine.step(1, *joining(lengths)).collect()
        with torch.inference_mode(), Operations() as operations:
            capture._decode(3, any_adapters=False)
        runs.append(operations.seen)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("architecture", WITH_PROMPTS)
def test_steps_with_prompts_are_the_same_work_in_the_same_places(architecture: str, tmp_path: Path) -> None:
    engine = started(make(architecture, tmp_path))
    runner: Any = engine._runner
    runner.model.attention.attend = attend_nothing
    runs: list[list[tuple[str, tuple[int, ...]]]] = []

    def capture(step: Callable[[], Any]) -> Callable[[], Any]:
        step()

        def watched() -> Any:
            with Operations() as operations:
                output = step()
            runs.append(operations.seen)
            return output

        return watched

    with torch.inference_mode():
        table = runner._batch.block_tables.table
        graphs = PromptGraphs([64], len(runner._batch), table, runner.block_size, runner.model.forward, capture)
        for running, lengths in (((5,), (9, 20)), ((33, 2), (13,))):
            engine.clear()
            engine.step(1, *joining(running)).collect()
            sequences, chunks = joining(lengths, first_block=40)
            prompt_chunks = [
                PromptChunk.next_of(each, tokens) for each, (_, tokens) in zip(sequences, chunks, strict=True)
            ]
            graphs.run(runner._batch.mixed_input(len(running), prompt_chunks, None))
    assert len(runs) == 2
    assert runs[0] == runs[1]


def attend_nothing(layer: int, query: Tensor, metadata: object, variant: object) -> Tensor:
    """Attention in plain torch stands aside: its work follows the longest sequence."""
    return torch.zeros_like(query)
