"""The synthetic models: what `tokenizers`, `transformers` and the engine read of them."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.images import photograph
from benchmarks.synthetic import MODELS, SyntheticModel, write_model
from benchmarks.synthetic_tokenizer import build_tokenizer
from benchmarks.synthetic_vision import PROCESSOR, SMOLVLM_500M, SPECIAL_TOKENS
from benchmarks.words import text
from benchmarks.workloads import GREETING, WORKLOADS

# The text that stands for an image in a prompt, in a process without torch.
_PROCESSED = """
import sys
from pathlib import Path
from tgi_server.router.media.data_urls import data_of
from tgi_server.router.media.worker import decoded, load_processor, processed
image = decoded(data_of(sys.argv[2]), 10**6)
print(processed(load_processor(Path(sys.argv[1])), image, "auto")[0])
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    model = MODELS["opt-125m"]
    return build_tokenizer(model.config.vocab_size, list(model.special_tokens))


def test_vocabulary_has_exactly_the_size_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 50272
    assert sorted(tokenizer.get_vocab().values()) == list(range(50272))


def test_special_tokens_have_the_ids_of_the_configuration(tokenizer: Tokenizer) -> None:
    config = MODELS["opt-125m"].config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (1, 2, 2)
    assert tokenizer.id_to_token(config.eos_token_id) == "</s>"
    assert tokenizer.id_to_token(config.pad_token_id) == "<pad>"


def test_one_model_has_positions_for_every_load() -> None:
    longest = max(load.length for load in WORKLOADS.values())
    assert MODELS["llama-360m-16k"].config.max_position_embeddings >= longest


def test_the_greeting_has_nine_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(GREETING).ids) == 9


def test_64_words_are_64_to_90_tokens(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(text(Random(seed), 64)).ids) for seed in range(100)]
    assert min(lengths) >= 64
    assert max(lengths) <= 90


@pytest.mark.parametrize("written", [GREETING, "two  spaces\n\ttab", "naïve 寿司 👩‍🍳", "xylophonically"])
def test_any_text_comes_back_as_it_was(tokenizer: Tokenizer, written: str) -> None:
    assert tokenizer.decode(tokenizer.encode(written).ids) == written


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 257 tokens, not 100"):
        build_tokenizer(100, ["</s>"])


def test_transformers_reads_the_folder_the_same_way(tiny_model: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(tiny_model)
    plain = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert len(loaded) == 1024
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded(GREETING)["input_ids"] == plain.encode(GREETING).ids
    chat = [{"role": "user", "content": "hello"}]
    assert loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == "user:hello\nassistant:"


def test_weights_are_bfloat16_and_spread_as_a_new_model_s(tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.bfloat16"}
    assert weights["model.layers.1.mlp.up_proj.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert "lm_head.weight" not in weights, "the head shares the embeddings' weights"


@pytest.mark.slow
def test_a_model_that_reads_images_has_a_processor_with_the_tokens_of_its_tower(tmp_path: Path) -> None:
    config = deepcopy(SMOLVLM_500M)
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers = 1
    folder = tmp_path / "smolvlm"
    write_model(SyntheticModel(config, SPECIAL_TOKENS, processor=PROCESSOR), folder)
    command = [sys.executable, "-c", _PROCESSED, str(folder), photograph("a", 64, 48)]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    patches, tiles = (512 // 16) ** 2, 5
    assert text.count("<image>") == tiles * patches // config.scale_factor**2 == 320
    assert {f"<row_{row}_col_{column}>" in text for row in (1, 2) for column in (1, 2)} == {True}
    chat = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"}]}]
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False) == "user:What is <image>\n"
