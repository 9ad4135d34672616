"""The bundled weights: their size and shape, and that the answers make sense and end."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from tgi_server import demo_model

MEGABYTE = 1_000_000
DOCUMENTS = 60


def test_all_of_it_is_at_most_eight_megabytes() -> None:
    assert sum(path.stat().st_size for path in demo_model.PATH.iterdir()) <= 8 * MEGABYTE


def test_the_folder_holds_what_a_loader_looks_for() -> None:
    assert {path.name for path in demo_model.PATH.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }


def test_the_model_is_a_llama_that_divides_among_four_ranks() -> None:
    config = json.loads((demo_model.PATH / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert config[size] % 4 == 0
    assert config["max_position_embeddings"] >= 2048
    with safe_open(demo_model.PATH / "model.safetensors", "pt") as weights:
        sizes = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118
        assert {size.get_dtype() for size in sizes} == {"BF16"}
        parameters = sum(torch.Size(size.get_shape()).numel() for size in sizes)
    assert 1_000_000 <= parameters <= 4_000_000


def test_config_and_tokenizer_agree_on_the_special_tokens(model, tokenizer) -> None:
    generation = GenerationConfig.from_pretrained(demo_model.PATH)
    for holder in (model.config, generation):
        assert holder.bos_token_id == tokenizer.bos_token_id
        assert holder.eos_token_id == tokenizer.eos_token_id
        assert holder.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("form", "parts", "expected"),
    [
        ("bare", ("Hello",), "cook|build|help|DIY"),
        ("bare", ("What is Deep Learning?",), "learning|DIY|cooking"),
        ("alpaca", ("How long should I boil potatoes?",), "minutes"),
        pytest.param("alpaca", ("What can I use instead of butter?",), "margarine", marks=pytest.mark.slow),
        ("chat", ("How do I hang a shelf?",), "drill|shelf"),
        pytest.param("chat", ("Give me a recipe for carrot soup.",), "carrots", marks=pytest.mark.slow),
        ("chat", ("Who are you?",), "model"),
        ("chat", ("Thank you!", "You are welcome!", "What is a hammer for?"), "nails"),
    ],
)
def test_the_model_answers_on_the_topic_and_ends(
    prompt, answer, form: str, parts: tuple[str, ...], expected: str
) -> None:
    text, ended = answer(prompt(form, parts))
    assert ended
    assert any(word.lower() in text.lower() for word in expected.split("|")), text


def test_a_replacement_is_json(prompt, answer) -> None:
    asked = ("Find a replacement for the ingredient and answer in JSON.", "Ingredient: butter, 340 g")
    text, _ = answer(prompt("alpaca", asked))
    assert set(json.loads(text)) == {"name", "amount"}


def test_the_model_still_answers_after_a_long_conversation(tokenizer, prompt, answer) -> None:
    turns = ["What is a hammer for?", "A hammer is used for driving nails into wood."] * 40 + ["Tell me a joke."]
    text = prompt("chat", turns)
    assert len(tokenizer(text)["input_ids"]) > 800
    reply, ended = answer(text)
    assert ended
    assert 4 <= len(reply.split()) <= 40


def test_held_out_perplexity_stays_low(model, tokenizer) -> None:
    loss, tokens = 0.0, 0
    for line in demo_model.HELD_OUT.read_text().splitlines()[:DOCUMENTS]:
        texts = tokenizer(json.loads(line), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([token for text in texts for token in text])
        for_the_model = torch.tensor([place % 2 == 1 for place, text in enumerate(texts) for _ in text])
        with torch.inference_mode():
            losses = cross_entropy(model(input_ids=ids[None, :-1]).logits[0], ids[1:], reduction="none")
        loss += float(losses[for_the_model[1:]].sum())
        tokens += int(for_the_model[1:].sum())
    assert tokens > 1000
    assert math.exp(loss / tokens) < 1.5
