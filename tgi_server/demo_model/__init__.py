"""The bundled demo model: a tiny Llama for trying things and for tests, that needs no network."""

from pathlib import Path
from typing import Final

PATH: Final[Path] = Path(__file__).resolve().parent / "weights"
"""The model's folder, in the layout that `transformers` writes. See docs/demo-model.md."""
