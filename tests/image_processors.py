"""Processors of models that read images, as their checkpoints have them, with small images and a tokenizer of bytes.

folder = save_processor("qwen2_5_vl", tmp_path)   # tokenizer, processor and config.json, without weights
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

BOS, EOS = "<s>", "</s>"
_QWEN = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 40}
_QWEN3 = _QWEN | {"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 40}}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS = {
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 28},
    "size": {"longest_edge": 56},
}
_IDEFICS_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)


@dataclass(frozen=True)
class Family:
    """The processor of a family.

    image_processor: name and settings. tokens: special ones. token: in whose places the model sees an image.
    shown: what a template writes for an image. settings: of the processor. named: attributes of its tokenizer.
    """

    processor: str
    image_processor: str
    image_settings: Mapping[str, Any]
    tokens: Sequence[str]
    token: str
    shown: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


_QWEN_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family("Qwen2VLProcessor", "Qwen2VLImageProcessor", _QWEN, _QWEN_TOKENS, "<|image_pad|>", _QWEN_SHOWN),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", _QWEN, _QWEN_TOKENS, "<|image_pad|>", _QWEN_SHOWN
    ),
    "qwen3_vl": Family(
        "Qwen3VLProcessor", "Qwen2VLImageProcessorFast", _QWEN3, _QWEN_TOKENS, "<|image_pad|>", _QWEN_SHOWN
    ),
    "gemma3": Family(
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": {"height": 28, "width": 28}, "do_pan_and_scan": None},
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "<image_soft_token>",
        "<start_of_image>",
        {"image_seq_length": 4},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "gemma4": Family(
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {"patch_size": 16, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        ("<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
        "<|image|>",
        "<|image|>",
        {},
        {
            **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
            **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
        },
    ),
    "mistral3": Family(
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 112}, "patch_size": 14},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        "[IMG]",
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "llava_next": Family(
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        ("<image>",),
        "<image>",
        "<image>\n",
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava": Family(
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        ("<image>",),
        "<image>",
        "<image>\n",
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "idefics3": Family(
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        _IDEFICS,
        _IDEFICS_TOKENS,
        "<image>",
        "<image>",
        {"image_seq_len": 4},
    ),
    "smolvlm": Family(
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        _IDEFICS,
        _IDEFICS_TOKENS,
        "<image>",
        "<image>",
        {"image_seq_len": 4},
    ),
    "internvl": Family(
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>\n",
        {"image_seq_length": 4},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "lfm2_vl": Family(
        "Lfm2VlProcessor",
        "Lfm2VlImageProcessorFast",
        {"tile_size": 64, "max_image_tokens": 8, "min_image_tokens": 2, "max_tiles": 4},
        (
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        ),
        "<image>",
        "<image>",
    ),
    "llama4": Family(
        "Llama4Processor",
        "Llama4ImageProcessorFast",
        {"size": {"height": 28, "width": 28}, "max_patches": 4},
        (
            *("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        "<|patch|>",
        "<|image|>",
        {"patch_size": 14, "pixel_shuffle_ratio": 0.5},
    ),
    "glm4v": Family(
        "Glm4vProcessor",
        "Glm4vImageProcessor",
        {
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 10},
        },
        ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        "<|image|>",
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
}


def chat_template(model_type: str) -> str:
    """Returns a template that shows images where they stand in a message."""
    return (
        "{% for message in messages %}{{ message.role }}: "
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}"
        "{% if part.type == 'image' %}" + FAMILIES[model_type].shown.replace("\n", "\\n").join(["{{ '", "' }}"]) + ""
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
    )


def tokenizer_of(model_type: str) -> Tokenizer:
    """Returns a tokenizer of bytes, line feeds by two and three, and the family's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [BOS, EOS, *alphabet, "ĊĊ", "ĊĊĊ"]
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in FAMILIES[model_type].tokens])
    return tokenizer


def save_processor(model_type: str, folder: Path) -> Path:
    """Writes a model's files but for its weights, and returns the folder."""
    family = FAMILIES[model_type]
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer = tokenizer_of(model_type)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write(folder / "tokenizer_config.json", names | {"extra_special_tokens": dict(family.named)})
    (folder / "chat_template.jinja").write_text(chat_template(model_type))
    image_processor = {"image_processor_type": family.image_processor, **family.image_settings}
    _write(folder / "preprocessor_config.json", image_processor | {"processor_class": family.processor})
    _write(folder / "processor_config.json", {"processor_class": family.processor, **family.settings})
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {"model_type": model_type}
    _write(file, config | {"image_token_id": tokenizer.token_to_id(family.token)})
    return folder


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns an image without two equal rows, another one for each seed."""
    gradient = Image.linear_gradient("L").rotate(seed * 10).resize((width, height))
    return Image.merge(
        "RGB",
        (
            gradient,
            gradient.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
            gradient.point(lambda level: (level + seed * 40) % 256),
        ),
    )


def as_file(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """Returns the image as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def as_data_url(image: Image.Image | bytes) -> str:
    """Returns the image as a data URL."""
    data = image if isinstance(image, bytes) else as_file(image)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content))
