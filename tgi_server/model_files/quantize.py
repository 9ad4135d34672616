"""Quantizes a model for the command line: reads the calibration text, and converts errors to ModelUnavailable."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tgi_server import demo_model
from tgi_server.engine.errors import EngineError
from tgi_server.engine.parallel import share_cores
from tgi_server.grammar.tokenizer import read_definition
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.gptq_quantizer import quantize_folder
from tgi_server.model_files.gptq_rounding import GptqSettings


def quantize_model(
    folder: Path,
    target: Path,
    settings: GptqSettings,
    *,
    calibration: Path | None,
    samples: int,
    length: int,
    trust_remote_code: bool,
) -> None:
    """Writes the model in a folder to another one, quantized. Raises ModelUnavailable.

    calibration: the text to calibrate with; None: the demo model's. samples: pieces of it. length: tokens of a piece.
    """
    share_cores(1)
    try:
        pieces = _samples(folder, calibration or demo_model.HELD_OUT, samples, length)
        quantize_folder(folder, target, pieces, settings, trust_remote_code=trust_remote_code)
    except (EngineError, OSError, ValueError) as error:
        raise ModelUnavailable(str(error)) from error


def _samples(folder: Path, source: Path, samples: int, length: int) -> list[Tensor]:
    """Returns pieces of the calibration text, spread over all of it: [tokens] int64 each. Raises ValueError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which is needed to read the calibration text")
    tokenizer = Tokenizer.from_str(read_definition(folder))
    tokens = [token for text in _texts(source) for token in tokenizer.encode(text).ids]
    pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    if not pieces:
        raise ValueError(f"{source} has no text to calibrate with")
    step = max(1, len(pieces) // samples)
    return [torch.tensor(piece) for piece in pieces[::step][:samples]]


def _texts(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
            yield "".join(entry) if isinstance(entry, list) else entry["text"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}, line {number}: a JSON object with `text` is expected") from error
