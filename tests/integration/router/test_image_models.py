"""Images from the client to the model: OpenAI's client, a real server, and tiny models with random weights."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.conftest import ServerFactory
from tests.image_processors import FAMILIES, as_data_url, photograph, save_processor, tokenizer_of
from tests.tiny_models import make_with_images

TOKENS = 8
# What the family's own processor makes of a prompt, in a process without torch.
_OWN = """
import json, sys
from pathlib import Path
import numpy as np
from tests.image_processors import photograph
from tgi_server.router.media.worker import load_processor
processor = load_processor(Path(sys.argv[1]))
images = [photograph(*size) for size in json.loads(sys.argv[3])]
made = processor(text=[sys.argv[2]], images=images, add_special_tokens=False, return_tensors="np")
np.savez(Path(sys.argv[1]) / "inputs.npz", **{name: made[name] for name in made if name != "text_replacement_offsets"})
"""
# By family: settings of the part that reads images, and of the whole.
_VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava_next": (
        {"image_size": 28, "patch_size": 14},
        {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "qwen2_5_vl": (
        {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "depth": 2}
        | {"num_heads": 2, "fullatt_block_indexes": [1], "window_size": 56},
        {},
    ),
}


def make(model_type: str, folder: Path) -> Path:
    vision, settings = _VISION[model_type]
    tokenizer = tokenizer_of(model_type)
    settings = settings | {"image_token_id": tokenizer.token_to_id(FAMILIES[model_type].token)}
    if (start := tokenizer.token_to_id("<|vision_start|>")) is not None:
        settings |= {"vision_start_token_id": start, "video_token_id": tokenizer.token_to_id("<|video_pad|>")}
    text = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    make_with_images(model_type, folder, torch.float32, text, vision, settings)
    return save_processor(model_type, folder)


@torch.inference_mode()
def expected(model_type: str, folder: Path, prompt: str, sizes: list[tuple[int, ...]]) -> tuple[int, str]:
    """Returns the tokens of the prompt, and what `generate()` adds to it."""
    subprocess.run([sys.executable, "-c", _OWN, str(folder), prompt, str(list(map(list, sizes)))], check=True)
    inputs = {name: torch.from_numpy(each) for name, each in np.load(folder / "inputs.npz").items()}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    length = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return length, tokenizer_of(model_type).decode(output[0, length:].tolist(), skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(_VISION))
def test_a_conversation_about_photographs(model_type: str, server: ServerFactory, tmp_path: Path) -> None:
    folder = make(model_type, tmp_path / "model")
    running = server(f"--model-id={folder}", "--dtype=float32").wait_until_ready()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    sizes = [(100, 60, 1), (60, 90, 2)]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": as_data_url(photograph(*size))}} for size in sizes]
    messages: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, parts[0], {"type": "text", "text": "x" * 150}],
        }
    ]

    def ask() -> Any:
        return client.chat.completions.create(
            model="any", messages=messages, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )

    shown = FAMILIES[model_type].shown
    prompt = f"user: What is {shown}{'x' * 150}assistant:"
    first = ask()
    length, text = expected(model_type, folder, prompt, sizes[:1])
    assert (first.usage.prompt_tokens, first.choices[0].message.content) == (length, text)
    messages += [{"role": "assistant", "content": "a chair"}, {"role": "user", "content": [parts[1]]}]
    second = ask()
    prompt = prompt.removesuffix("assistant:") + f"assistant: a chairuser: {shown}assistant:"
    length, text = expected(model_type, folder, prompt, sizes)
    assert (second.usage.prompt_tokens, second.choices[0].message.content) == (length, text)
    assert second.usage.prompt_tokens_details.cached_tokens >= 128
    assert ask().choices[0].message.content == text
    del messages[1:]
    parts[0]["image_url"]["url"] = as_data_url(photograph(100, 60, 3))
    messages[0]["content"][1] = parts[0]
    _, text = expected(model_type, folder, f"user: What is {shown}{'x' * 150}assistant:", [(100, 60, 3)])
    assert ask().choices[0].message.content == text
