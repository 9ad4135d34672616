"""The chart of benchmarks/RESULTS.md, drawn from the first table of that page as an SVG for light and dark pages."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"

_MODEL = "Llama-360M"
_LOADS = {"W2": "1 user", "W3": "8 users", "W4": "32 users", "W6": "16 chats"}
_LEFT, _UNIT, _ROW, _GAP = 230, 82, 19, 40
_STYLE = """text { font: 13px system-ui, sans-serif; fill: #22262b; }
.cpu { font-weight: 600; }
.load { text-anchor: end; }
.note { fill: #5d646d; }
.bar { fill: #1b6b4f; }
.line { stroke: #5d646d; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e6e1; }
  .note { fill: #a2a8b0; }
  .bar { fill: #6fcf97; }
  .line { stroke: #a2a8b0; }
}"""


def speedups() -> Iterator[tuple[str, str, float]]:
    """Yields each kind of CPU, load and ratio of the model in the chart."""
    cpu = ""
    names: list[str] = []
    for line in re.findall(r"(?m)^\|.*\|$", RESULTS.read_text()):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "CPU":
            names = cells
        cpu = cells[0] or cpu
        if names and len(cells) == len(names) and cells[1] == _MODEL:
            yield from ((cpu, load, float(cells[names.index(load)])) for load in _LOADS)


def chart() -> str:
    """Returns the chart: horizontal bars, one group for each kind of CPU."""
    parts = []
    y = 48
    for cpu, bars in groupby(speedups(), lambda each: each[0]):
        y += _GAP - _ROW
        parts.append(f'<text class="cpu" x="{_LEFT}" y="{y}">{cpu}</text>')
        for _, load, ratio in bars:
            y += _ROW
            parts.append(
                f'<text class="load" x="{_LEFT - 10}" y="{y}">{_LOADS[load]}</text>'
                f'<rect class="bar" x="{_LEFT}" y="{y - 12}" width="{ratio * _UNIT:.0f}" height="14" rx="2"/>'
                f'<text x="{_LEFT + ratio * _UNIT + 6:.0f}" y="{y}">{ratio:.2f}</text>'
            )
        y += 4
    one = _LEFT + _UNIT
    title = f"Speed of {_MODEL} in bfloat16, relative to vLLM 0.32 on the same CPU"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 {y + 20}" role="img" aria-label="{title}">',
            f"<style>\n{_STYLE}\n</style>",
            f'<text class="cpu" x="10" y="22">{title}</text>',
            *parts,
            f'<line class="line" x1="{one}" x2="{one}" y1="52" y2="{y + 8}"/>',
            f'<text class="note" x="{one - 8}" y="46">1: as fast as vLLM</text>',
            "</svg>\n",
        ]
    )
