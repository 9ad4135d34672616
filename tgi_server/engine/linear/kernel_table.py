"""A table of kernels by number of rows."""

from dataclasses import dataclass
from typing import Self

# The FP8 product of torch on GPUs, for which inputs are rounded to 8 bits.
SCALED_MM = "scaled_mm"


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Kernels by number of rows. kernels: their names. from_rows: minimum number of rows of each; ascending from 1.

    As text it is "bf16,amx@16": the first kernel up to 15 rows, the second from 16 rows on.
    """

    kernels: tuple[str, ...]
    from_rows: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """Parses a table. Raises ValueError for other text."""
        kernels, from_rows = [], []
        for part in text.split(","):
            name, at, rows = part.strip().partition("@")
            if not name.replace("_", "").isalnum() or (at and not rows.isdecimal()):
                raise ValueError(f"`{part}` is not a kernel and its rows; write NAME or NAME@ROWS")
            kernels.append(name)
            from_rows.append(int(rows) if at else 1)
        if from_rows[0] != 1 or sorted(set(from_rows)) != from_rows:
            raise ValueError(f"`{text}`: the first kernel begins at 1 row, and each later one at more rows")
        return cls(tuple(kernels), tuple(from_rows))

    def __str__(self) -> str:
        pairs = zip(self.kernels, self.from_rows, strict=True)
        return ",".join(name if rows == 1 else f"{name}@{rows}" for name, rows in pairs)

    def at(self, rows: int) -> str:
        """Returns the kernel for this number of rows."""
        return next(
            name for name, first in reversed(list(zip(self.kernels, self.from_rows, strict=True))) if first <= rows
        )
