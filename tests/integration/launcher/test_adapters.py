"""Servers with adapters, asked by many clients at once: every reply is that of the model which peft merges."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.conftest import ServerFactory
from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make, make_tokenizer
from tests.unit.engine.lora.adapted import AdaptedModel, make_adapted
from tests.unit.engine.requests import NEW, generated

CLIENTS = 16
TEXT = "the quick brown fox jumps over the lazy dog and then it rests in the shade of an old oak"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = make(
        "llama",
        tmp_path_factory.mktemp("adapted") / "model",
        vocab_size=TOKENIZER_VOCAB_SIZE,
        max_position_embeddings=512,
    )
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return make_adapted(folder)


def prompt(number: int) -> str:
    """Returns a text whose beginning it shares with those of other numbers."""
    words = TEXT.split()
    return " ".join([*words[: 6 + number % 3], *words[number:]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--max-loras=1",),
        ("--max-loras=2", "--max-total-tokens=128", "--max-batch-total-tokens=256"),
        ("--num-shard=2", "--max-loras=3"),
        ("--speculate=3",),
    ],
    ids=" ".join,
)
def test_many_clients_over_five_adapters(flags: tuple[str, ...], model: AdaptedModel, server: ServerFactory) -> None:
    listed = ",".join(f"{name}={folder}" for name, folder in model.adapters.items())
    running = server(f"--model-id={model.folder}", "--dtype=float32", f"--lora-adapters={listed}", *flags)
    running.wait_until_ready()
    ids = model.ids()

    def ask(number: int) -> list[int]:
        parameters: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "details": True}
        if adapter := ids[number]:
            parameters["adapter_id"] = adapter
        answer = running.generate(prompt(number), **parameters)
        return [token["id"] for token in answer["details"]["tokens"]]

    with ThreadPoolExecutor(CLIENTS) as clients:
        first = list(clients.map(ask, range(CLIENTS)))
        again = list(clients.map(ask, range(CLIENTS)))
    assert first == again
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    for number in range(CLIENTS):
        expected = generated(model.merged[ids[number]], tokenizer.encode(prompt(number)).ids)
        assert first[number] == expected, f"request {number}, with the adapter {ids[number]!r}"
