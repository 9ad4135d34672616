"""Prompts with images for tiny random models of every family that reads images, and what `transformers` adds to them.

An image is random numbers in the tensors that the family's image processor returns, of several sizes.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.tiny_models import make_with_images
from tgi_server import contract
from tgi_server.contract import Image

IMAGE_TOKEN, BREAK_TOKEN = 198, 197
# Tokens of prompts are below these.
_TEXT_TOKENS = 190
_PATCH = 4

_TILES: dict[str, Any] = {"image_size": 16, "patch_size": _PATCH}
_GRID: dict[str, Any] = {"patch_size": _PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}
_QWEN: dict[str, Any] = _GRID | {"depth": 3, "num_heads": 2}
# By `model_type`: settings of the part that reads images, and of the whole.
_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (_TILES, {"mm_tokens_per_image": 4}),
    "gemma4": (
        {"patch_size": _PATCH, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 64}
        | {"num_key_value_heads": 2},
        {"video_token_id": 196, "audio_token_id": 195},
    ),
    "glm4v": (_GRID | {"depth": 2, "num_heads": 2, "image_size": 32}, {}),
    "idefics3": (_TILES, {"scale_factor": 2}),
    "internvl": (_TILES | {"image_size": [16, 16], "patch_size": [_PATCH, _PATCH]}, {"downsample_ratio": 0.5}),
    "lfm2_vl": ({"patch_size": _PATCH, "num_patches": 64}, {"downsample_factor": 2}),
    "llama4": (_TILES | {"pixel_shuffle_ratio": 0.5, "vision_output_dim": 32, "projector_input_dim": 32}, {}),
    "llava": (_TILES, {}),
    "llava_next": (_TILES, {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}),
    "mistral3": (_TILES | {"image_size": 64}, {"spatial_merge_size": 2}),
    "qwen2_vl": ({"patch_size": _PATCH, "embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2}, {}),
    "qwen2_5_vl": (_QWEN | {"fullatt_block_indexes": [1], "window_size": 16}, {}),
    "qwen3_5": (_QWEN | {"num_position_embeddings": 64}, {}),
    "qwen3_5_moe": (_QWEN | {"num_position_embeddings": 64}, {}),
    "qwen3_vl": (_QWEN | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64}, {}),
    "qwen3_vl_moe": (_QWEN | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64}, {}),
    "smolvlm": (_TILES, {"scale_factor": 2}),
}
FAMILIES = sorted(_SETTINGS)
_TYPE_NAMES = {"gemma3": "token_type_ids"} | dict.fromkeys(
    ("gemma4", "glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    "mm_token_type_ids",
)


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images. tensors: of each image, as its image processor returns them."""

    ids: list[int]
    images: list[Image]
    tensors: list[dict[str, Tensor]]


def make_image_model(model_type: str, folder: Path, **text: Any) -> Path:
    """Saves a model in float32 and returns its folder. text: settings of its text model."""
    vision, settings = _SETTINGS[model_type]
    return make_with_images(model_type, folder, torch.float32, text, vision, settings | {"image_token_id": IMAGE_TOKEN})


def image_tensors(model_type: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """Returns an image of about so many tokens high and wide."""
    noise = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise)

    if model_type.startswith(("qwen", "glm")):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        return {"pixel_values": pixels(4 * rows * columns, 3 * 2 * _PATCH**2), "image_grid_thw": grid}
    if model_type == "mistral3":
        height, width = 2 * _PATCH * rows, 2 * _PATCH * columns
        return {"pixel_values": pixels(1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
    if model_type in ("idefics3", "smolvlm"):
        count = rows * columns + 1
        mask = torch.ones(1, count, 16, 16, dtype=torch.bool)
        return {"pixel_values": pixels(1, count, 3, 16, 16), "pixel_attention_mask": mask}
    if model_type == "lfm2_vl":
        shape, count = torch.tensor([[2 * rows, 2 * columns]]), 4 * rows * columns
        mask = torch.ones(1, count, dtype=torch.int64)
        return {"pixel_values": pixels(1, count, 3 * _PATCH**2), "spatial_shapes": shape, "pixel_attention_mask": mask}
    if model_type == "gemma4":
        places = torch.cartesian_prod(torch.arange(2 * rows), torch.arange(2 * columns)).flip(1)[None]
        return {"pixel_values": pixels(1, len(places[0]), 3 * _PATCH**2).sigmoid(), "image_position_ids": places}
    if model_type == "llava_next":
        rows, columns = min(rows, 2), min(columns, 2)
        sizes = torch.tensor([[16 * rows, 16 * columns]])
        tiles = 5 if rows == columns else 3
        return {"pixel_values": pixels(1, tiles, 3, 16, 16), "image_sizes": sizes}
    tiles = rows if model_type in ("internvl", "llama4") else 1
    return {"pixel_values": pixels(tiles, 3, 16, 16)}


def as_image(tensors: dict[str, Tensor], start: int, length: int) -> Image:
    """Returns an image as the router sends it."""
    names = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
    parts = tuple(
        contract.Tensor(name, names[each.dtype], tuple(each.shape), each.contiguous().numpy().tobytes())
        for name, each in tensors.items()
    )
    return Image(hashlib.sha256(b"".join(each.data for each in parts)).digest(), start, length, parts)


def image_prompt(
    reference: PreTrainedModel, sizes: Sequence[tuple[int, int]], seed: int = 0, texts: Sequence[int] | None = None
) -> ImagePrompt:
    """Returns a prompt with an image of each size.

    texts: number of tokens before each image, and after the last.
    """
    kind = reference.config.model_type
    numbers = random.Random(seed)
    text = [[numbers.randrange(3, _TEXT_TOKENS) for _ in range(count)] for count in texts or [5] * (len(sizes) + 1)]
    ids, images, tensors = text[0], [], []
    for index, (rows, columns) in enumerate(sizes):
        own = image_tensors(kind, rows, columns, seed=100 * seed + index)
        tokens = [IMAGE_TOKEN] * _count(reference, own)
        if kind in ("mistral3", "idefics3"):  # which have other tokens among those of an image
            tokens.insert(len(tokens) // 2, BREAK_TOKEN)
        images.append(as_image(own, len(ids), len(tokens)))
        tensors.append(own)
        ids = ids + tokens + text[index + 1]
    return ImagePrompt(ids, images, tensors)


def load_image_reference(folder: Path) -> PreTrainedModel:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def expected(reference: PreTrainedModel, prompt: ImagePrompt, tokens: int) -> list[int]:
    """Returns what `generate()` adds to a prompt."""
    kind, ids = reference.config.model_type, torch.tensor([prompt.ids])
    inputs = _joined(kind, prompt.tensors) if prompt.tensors else {}
    if prompt.tensors and kind in _TYPE_NAMES:
        inputs[_TYPE_NAMES[kind]] = (ids == IMAGE_TOKEN).long()
    output = reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, max_new_tokens=tokens, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt.ids) :].tolist()


def _joined(kind: str, images: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of several images as the processor does: concatenated, and padded to the largest."""
    axis = 1 if kind in ("idefics3", "smolvlm") else 0
    joined = {}
    for name in images[0]:
        parts = [image[name] for image in images]
        sizes = [max(part.shape[dim] for part in parts) for dim in range(parts[0].dim())]
        filled = [
            pad(
                part,
                [
                    n
                    for dim in reversed(range(part.dim()))
                    for n in (0, 0 if dim == axis else sizes[dim] - part.shape[dim])
                ],
                value=-1 if name == "image_position_ids" else 0,
            )
            for part in parts
        ]
        joined[name] = torch.cat(filled, axis)
    return joined


@torch.inference_mode()
def _count(reference: PreTrainedModel, tensors: dict[str, Tensor]) -> int:
    """Returns the tokens that a model makes of an image."""
    if reference.config.model_type == "llama4":
        return len(reference.get_image_features(**tensors).last_hidden_state.flatten(0, -2))
    found = reference.get_image_features(**tensors, return_dict=True).pooler_output
    return sum(len(each.flatten(0, -2)) for each in ([found] if isinstance(found, Tensor) else found))
