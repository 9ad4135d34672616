"""Steps captured as CUDA graphs: the host starts one of them with a single call.

A captured step runs the same kernels with the same addresses and the same number of rows as at its capture. So there is
a graph for each of several numbers of rows, and a step with fewer rows is padded: the rows after the last sequence have
the scratch block, and their results are dropped.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import AttentionBackend
from tgi_server.engine.errors import PeerLost
from tgi_server.engine.runners.caps import MOST_SEQUENCES

logger = logging.getLogger(__name__)

# The batch sizes of TGI and some more: the host saves as much with a large batch as with a small one.
DEFAULT_SIZES = (1, 2, 4, 8, 16, 32, 48, *range(64, MOST_SEQUENCES + 1, 32))

T = TypeVar("T")


class Capture(Protocol):
    """Captures a step. Returns a function that repeats it, and returns the step's own tensors with new contents."""

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]: ...


def graph_batch_sizes(wanted: Sequence[int] | None, max_rows: int) -> list[int]:
    """Returns the batch sizes to capture, smallest first. wanted: None: the default ones, and all rows."""
    if wanted is not None:
        return sorted({size for size in wanted if 0 < size <= max_rows})
    return sorted({*(size for size in DEFAULT_SIZES if size < max_rows), min(max_rows, DEFAULT_SIZES[-1])})


class SharedOutputs:
    """Output tensors that the steps of all sizes share, so that not each of them keeps its own."""

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()

    def put(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """Returns where the outputs are now. The first ones are the largest; the others may have fewer rows."""
        if not self._tensors:
            self._tensors = tuple(torch.empty_like(output) for output in outputs)
        kept = tuple(tensor[: len(output)] for tensor, output in zip(self._tensors, outputs, strict=True))
        for tensor, output in zip(kept, outputs, strict=True):
            tensor.copy_(output)
        return kept


class DecodeGraphs:
    """Captured steps in which sequences only decode. What `run` returns is overwritten by the next run."""

    def __init__(self, sizes: Iterable[int], step: Callable[[int], tuple[Tensor, ...]], capture: Capture) -> None:
        """step: computes a number of rows, the first dimension of whatever it returns.

        Raises RuntimeError if the step cannot be captured. The largest one is captured first: the others fit into the
        memory that it has allocated.
        """
        outputs = SharedOutputs()
        self._steps: dict[int, Callable[[], tuple[Tensor, ...]]] = {}
        for size in sorted(sizes, reverse=True):
            self._steps[size] = capture(lambda rows=size: outputs.put(*step(rows)))  # type: ignore[misc]
        self.sizes = sorted(self._steps)

    def run(self, rows: int) -> tuple[Tensor, ...] | None:
        """Returns the outputs of a captured step for the first `rows` rows; None if none is large enough."""
        size = next((size for size in self.sizes if size >= rows), None)
        return None if size is None else tuple(part[:rows] for part in self._steps[size]())


def capture_for(backend: AttentionBackend) -> Capture | None:
    """Returns a capture for the backend's device; None where a captured step would not hold for other lengths."""
    return _CudaCapture(backend.device) if backend.any_lengths else None


def try_capture(make: Callable[[], T], what: str) -> tuple[T | None, str | None]:
    """Returns what `make` captures, and no reason; or None and the reason, after a line in the log, if it cannot."""
    started = time.perf_counter()
    try:
        graphs = make()
    except PeerLost:
        raise
    except Exception as error:  # of the device, of a compiler
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning("%s runs without CUDA graphs: %s", what, reason)
        return None, reason
    logger.info("captured CUDA graphs for %s in %.1f s", what, time.perf_counter() - started)
    return graphs, None


class _CudaCapture:
    """Captures into one memory pool: a step's tensors may be overwritten by any other step's."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # compiles kernels, and makes libraries take their workspaces
            _without_waiting(step)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may ask for the state of their events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()

        def replay() -> T:
            graph.replay()
            return output

        return replay


def _without_waiting(step: Callable[[], object]) -> None:
    """Runs a step, and raises RuntimeError if the host reads results of the device, which a captured step cannot do.

    Here the error does no harm. In the middle of a capture, it would be an error of the device.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
