"""Quantises a model for the command line: reads the calibration text, and turns errors into the shard's."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tgi_server import demo_model
from tgi_server.engine import EngineError
from tgi_server.engine.quantization.gptq import GptqSettings
from tgi_server.engine.quantizer import quantize_folder
from tgi_server.engine.sharding import share_cores
from tgi_server.shard.errors import ModelUnavailable
from tgi_server.shard.settings import QuantizeSettings


def quantize_model(settings: QuantizeSettings, folder: Path) -> None:
    """Writes the folder that the settings name. Raises ModelUnavailable."""
    share_cores(1)
    wanted = GptqSettings(settings.bits, settings.groupsize, settings.percdamp, settings.act_order)
    try:
        samples = _samples(settings, folder)
        quantize_folder(folder, settings.output_dir, samples, wanted, trust_remote_code=settings.trust_remote_code)
    except (EngineError, OSError, ValueError) as error:
        raise ModelUnavailable(str(error)) from error


def _samples(settings: QuantizeSettings, folder: Path) -> list[Tensor]:
    """Returns pieces of the calibration text, spread over all of it: [tokens] int64 each. Raises ValueError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which is needed to read the calibration text")
    tokenizer = Tokenizer.from_file(str(file))
    source = settings.calibration or demo_model.HELD_OUT
    tokens = [token for text in _texts(source) for token in tokenizer.encode(text).ids]
    pieces = [tokens[start : start + settings.length] for start in range(0, len(tokens), settings.length)]
    if not pieces:
        raise ValueError(f"{source} has no text to calibrate with")
    step = max(1, len(pieces) // settings.samples)
    return [torch.tensor(piece) for piece in pieces[::step][: settings.samples]]


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
