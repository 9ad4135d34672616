"""What a GPU's host would wait for in a step, and what would not be the same in each: found on a CPU, by operation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import ARCHITECTURES, make
from tests.unit.engine.requests import load_engine, prompts
from tests.unit.engine.runners.test_parity import ELSEWHERE, PADDED
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence

# Operations whose result, or its size, the host has to know.
WAITING = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "bincount")
# Models that look at what the device computes in some versions of `transformers`: they decode without CUDA graphs.
WAITS: frozenset[str] = frozenset({"gpt2"})
QUICK = {"llama", "opt", "gemma2"}
PAGED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(ARCHITECTURES.keys() - ELSEWHERE - PADDED)
]
SAMPLING = [
    SamplingParameters(),
    SamplingParameters(do_sample=True, temperature=0.7, top_k=20, top_p=0.9, seed=1),
    SamplingParameters(do_sample=True, typical_p=0.7, min_p=0.01, seed=2, watermark=True),
    SamplingParameters(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={4: 3.0}),
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
        places = tuple(
            place for each in inputs if (place := each.untyped_storage().data_ptr()) not in self._made and place
        )
        result = operation(*arguments, **(options or {}))
        self.seen.append((name, places))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in places:
                self._made.add(each.untyped_storage().data_ptr())
                self._kept.append(each)
        return result


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


@pytest.mark.parametrize("architecture", [each for each in PAGED if each.values[0] not in WAITS])
def test_decoding_is_the_same_work_in_the_same_places(architecture: str, tmp_path: Path) -> None:
    """As CUDA graphs have it. The attention in plain torch stands aside: its work follows the longest sequence."""
    engine = started(make(architecture, tmp_path))
    runs = []
    for lengths in ((5, 20, 9), (33, 2, 40)):
        engine.clear()
        engine.step(1, *joining(lengths)).collect()
        runner: Any = engine._runner
        runner._backend.attend = lambda layer, query, metadata, variant: torch.zeros_like(query)
        with torch.inference_mode(), Operations() as operations:
            runner._run(runner._batch.decode_input(3, longest=runner._batch.max_total_tokens))
        runs.append(operations.seen)
        del runner._backend.attend
    assert runs[0] == runs[1]
