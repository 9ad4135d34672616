"""Images in chats, in a whole server: the text is that of `transformers`, and a known image is not computed again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.conftest import ServerFactory
from tests.image_processors import as_data_url, photograph, save_processor, tokenizer_of
from tests.servers import TextGenerationServer
from tests.tiny_models import make_with_images

NEW = 12
SIZES = [(140, 84), (56, 112)]
# The tensors that a family's own processor makes of a conversation, in a process without torch.
_OWN = """
import json, sys
from pathlib import Path
import numpy as np
from tests.image_processors import photograph
from tgi_server.router.media.worker import load_processor
processor = load_processor(Path(sys.argv[1]))
messages, sizes = json.loads(sys.argv[2])
text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
images = [photograph(*size) for size in sizes]
made = processor(text=[text], images=images, add_special_tokens=False, return_tensors="np")
np.savez(sys.argv[3], **{name: made[name] for name in made})
"""


def messages(*images: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is broken?"}, *images]}]


def expected(folder: Path, scratch: Path) -> str:
    """Returns what `generate()` of `transformers` answers to the conversation."""
    arguments = json.dumps([messages(*({"type": "image"} for _ in SIZES)), SIZES])
    subprocess.run([sys.executable, "-c", _OWN, str(folder), arguments, str(scratch / "own.npz")], check=True)
    inputs = {name: torch.from_numpy(each) for name, each in np.load(scratch / "own.npz").items()}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    types = (inputs["input_ids"] == model.config.image_token_id).long()
    inputs["mm_token_type_ids"] = types
    model.generation_config.eos_token_id = None
    output = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def ask(server: TextGenerationServer, seeds: tuple[int, int] = (0, 0)) -> tuple[str, dict[str, Any]]:
    images = [
        {"type": "image_url", "image_url": {"url": as_data_url(photograph(*size, seed=seed))}}
        for size, seed in zip(SIZES, seeds, strict=True)
    ]
    body = {
        "model": "m",
        "messages": messages(*images),
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": "a",
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_chat_with_images_gets_the_text_of_transformers(shards: int, server: ServerFactory, tmp_path: Path) -> None:
    family = "qwen2_5_vl"
    vision = {"patch_size": 14, "depth": 2, "num_heads": 2, "fullatt_block_indexes": [1]}
    text = {"vocab_size": tokenizer_of(family).get_vocab_size(), "max_position_embeddings": 1024}
    folder = make_with_images(family, tmp_path / family, torch.float32, text, vision)
    save_processor(family, folder)
    running = server(f"--model-id={folder}", "--dtype=float32", "--max-batch-size=4", f"--num-shard={shards}")
    running.wait_until_ready()
    answer, usage = ask(running)
    assert answer.strip() == expected(folder, tmp_path).strip()
    again, known = ask(running)
    assert again == answer
    assert known["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]
    _, other = ask(running, (3, 0))
    assert other["prompt_tokens_details"]["cached_tokens"] < 0.5 * usage["prompt_tokens"]
