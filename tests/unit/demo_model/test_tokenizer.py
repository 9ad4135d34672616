"""The bundled tokenizer, read by `tokenizers` alone and by `transformers`."""

import pytest
from tokenizers import Tokenizer

from tgi_server import demo_model

TEXTS = (
    "Hello, world!",
    "  two  spaces,\ttabs\r\nand\n\n\nlines  ",
    "Crème brûlée für 4 Personen: 250 g Zucker, ½ l Sahne",
    "寿司とラーメン、김치 찌개, борщ, حمص, मसाला",
    "👩‍🍳🔨 \U0001f1eb\U0001f1f7 e\u0301 \u0000 \ufeff",
    '{"name": "olive oil", "amount": "80 ml"}',
    "don't DON'T 12345.67 --flag=value <b>x</b>",
)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model.PATH / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(plain: Tokenizer, tokenizer, text: str) -> None:
    ids = plain.encode(text, add_special_tokens=False).ids
    assert plain.decode(ids) == text
    assert tokenizer.decode(ids) == text
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def test_encoding_puts_the_beginning_token_in_front(plain: Tokenizer, tokenizer) -> None:
    ids = plain.encode("Boil the rice.").ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids == tokenizer("Boil the rice.")["input_ids"]
    assert ids[1:] == plain.encode("Boil the rice.", add_special_tokens=False).ids


def test_special_tokens_are_known_and_skipped(plain: Tokenizer, tokenizer) -> None:
    ids = plain.encode("<|user|>Hello<|assistant|>", add_special_tokens=False).ids
    assert len(ids) == 3
    assert plain.decode(ids) == "Hello"
    assert plain.decode(ids, skip_special_tokens=False) == "<|user|>Hello<|assistant|>"
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_the_vocabulary_has_the_size_that_was_promised(plain: Tokenizer) -> None:
    assert 2000 <= plain.get_vocab_size() <= 4000
    assert plain.get_vocab_size() % 64 == 0


def test_texts_of_the_models_domain_take_few_tokens(plain: Tokenizer) -> None:
    text = "Peel and slice the carrots, then boil them for about 8 minutes, until they are just tender."
    assert len(plain.encode(text, add_special_tokens=False).ids) <= 24
