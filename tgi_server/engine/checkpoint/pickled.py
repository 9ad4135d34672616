"""Reads `.bin` files of weights: pickles, which can run any code when they are read by Python's own reader.

`weights_only` makes torch refuse all but tensors.
"""

from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from tgi_server.engine.errors import InvalidWeights


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a `.bin` file. Raises InvalidWeights if it is corrupt, or holds more than named tensors.

    Raises FileNotFoundError if there is none.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise InvalidWeights(f"{path} is corrupt, or holds more than tensors; it is not loaded") from error
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise InvalidWeights(f"{path} is corrupt or incomplete; download it again") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InvalidWeights(f"{path} holds something other than named tensors; it is not loaded")
    return content
