"""Quantised checkpoints whose tensors do not fit together: one line that names the tensor, whatever is wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantized_models import LAYOUTS, make_quantized
from tgi_server.engine import EngineConfig
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.errors import EngineError

LAYER = "layers.0.mlp.down_proj"
# Ends of the names of tensors that need not be there, and of those that nobody reads.
OPTIONAL = ("g_idx", "zero_point")
UNREAD = ("bias", "weight_format", "input_scale")


def damaged(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Yields what may have become of a tensor, each with a word for it; None: it is not there."""
    if not name.endswith(OPTIONAL):
        yield "missing", None
    if tensor.dim():
        yield "short", tensor[:-1]
        yield "empty", tensor[:0]
        yield "in another dimension", tensor.unsqueeze(0).expand(3, *tensor.shape)
    if tensor.dim() > 1:
        yield "narrow", tensor[..., :-1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_tensor_is_named_in_one_line(layout: str, tmp_path: Path) -> None:
    experts = layout == "mxfp4"
    folder, _ = make_quantized(layout, tmp_path, "gpt_oss" if experts else "llama")
    layer = LAYER.replace("mlp", "mlp.experts") if experts else LAYER
    file = folder / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name in [name for name in whole if layer in name and not name.endswith(UNREAD)]:
        for what, tensor in damaged(name, whole[name]):
            others = {other: each for other, each in whole.items() if other != name}
            save_file(others | ({} if tensor is None else {name: tensor.contiguous()}), file)
            with pytest.raises(EngineError) as raised:
                load_model(EngineConfig(folder, dtype=torch.float32, custom_kernels=False), torch.device("cpu"))
            message = str(raised.value)
            assert layer in message, f"{name} is {what}: {message}"
            assert "\n" not in message
