"""The bundled demo model: a tiny Llama for trying things and for tests, that needs no network."""

from pathlib import Path
from typing import Final

# The model's folder, in the layout that `transformers` writes. See docs/demo-model.md.
PATH: Final[Path] = Path(__file__).resolve().parent / "weights"

# What answers call the model.
NAME: Final = "oatmill-demo"

# Questions that it answers correctly, for first trials.
EXAMPLES: Final = (
    "How do I hang a picture?",
    "How long do I boil potatoes?",
    "How do I sharpen a knife?",
    "What can I use instead of butter?",
)

# Documents that the model was not trained on, one a line: a list of texts; every other one, from the second
# on, is for the model to write. In the repository only: an installed package does not have it.
HELD_OUT: Final[Path] = PATH.parent / "held_out.jsonl"
