"""Computes the same thing in two ways and compares the results. Kernels that fail this at load are not used."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from tgi_server.engine.errors import PeerLost, UnsupportedModel

# Maximum difference from the known result, as a share of its norm, by what is computed and by dtype.
TOLERANCES = {
    "norm": {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    "kernel": {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    "LoRA": {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2},
    "logits": {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2},
}
# Additional tolerance for rounding to FP8: of a product's inputs, and of keys. A key that differs in its last bit may
# be rounded to another FP8 number, which differs by a sixteenth or an eighth.
FP8_INPUTS, FP8_KEYS = 5e-2, 2e-2

# A description of what was computed, the result to check, and the expected one, of the same shape and device.
Case = tuple[str, Tensor, Tensor]


def fault_of(
    name: str,
    cases: Callable[[], Iterable[Case]],
    kind: str = "kernel",
    allowance: float = 0.0,
    measure: Callable[[Tensor, Tensor], float] | None = None,
) -> str | None:
    """Returns the reason why something must not be used; None if its results are right in all cases.

    name: description of what computes. cases: computes both results, one case after the other; an exception from it is
    a fault, too. kind: the row of TOLERANCES. allowance: additional tolerance. measure: returns the difference of a
    result from the known one; None: `relative_error`.
    """
    return failure_of(name, partial(_difference, name, cases, kind, allowance, measure or relative_error))


def failure_of(name: str, check: Callable[[], str | None]) -> str | None:
    """Returns the result of `check`, or a description of the error that it raises, in a compiler or driver for example.

    Raises PeerLost if another shard is lost.
    """
    try:
        return check()
    except PeerLost:
        raise
    except UnsupportedModel as refusal:
        return str(refusal)
    except Exception as failure:
        return f"{name} fails ({type(failure).__name__}: {failure})"


def _difference(
    name: str,
    cases: Callable[[], Iterable[Case]],
    kind: str,
    allowance: float,
    measure: Callable[[Tensor, Tensor], float],
) -> str | None:
    for case, actual, known in cases():
        error = measure(actual, known)
        if not error <= TOLERANCES[kind][known.dtype] + allowance:  # not a number is a fault
            return f"{name} is off by {error:.2g} {case}".rstrip()
    return None


def relative_error(actual: Tensor, known: Tensor) -> float:
    """Returns the norm of the difference as a share of the known result's norm; NaN if there is any NaN."""
    return float(_norm(actual.float() - known.float()) / _norm(known.float()).clamp(min=1e-30))


def row_error(actual: Tensor, known: Tensor) -> float:
    """Returns the largest relative error of any row, [rows, ...]."""
    return float(_row_errors(actual, known).max())


def logits_error(actual: Tensor, known: Tensor) -> float:
    """Returns the largest relative error of any row of logits, [rows, vocab_size].

    In dtypes smaller than float32 it is the second largest error, since rounding may choose another expert for a token;
    a wrong computation shows in several rows. NaN when there is any NaN.
    """
    errors = _row_errors(actual, known)
    if known.dtype is torch.float32 or errors.isnan().any():
        return float(errors.max())
    return float(errors.sort().values[-2])


def _row_errors(actual: Tensor, known: Tensor) -> Tensor:
    """Returns [rows] float32."""
    change = _norm((actual.float() - known.float()).flatten(1), 1)
    # Rows of zeros, as of a model that knows nothing at some position, are equal too.
    return (change / _norm(known.float().flatten(1), 1)).masked_fill(change == 0, 0)


def _norm(values: Tensor, dim: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(values, dim=dim)
