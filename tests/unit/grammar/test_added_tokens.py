"""Tokens that stand only beside tokenizer.json have the ids that `transformers` gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.fakes.vocabularies import byte_level
from tgi_server.grammar.added_tokens import add_missing_tokens
from tgi_server.grammar.tokenizer import read_definition
from tgi_server.router.errors import StartupError
from tgi_server.router.text.tokenizer import load_tokenizer, tokenizer_of
from tgi_server.router.text.tokenizer_config import TokenizerConfig

TEXT = "a<|new|>b <extra>c</s><pad>world"
SIZE = byte_level().vocab_size
NEW, EXTRA = {"content": "<|new|>", "special": True}, {"content": "<extra>", "special": False, "lstrip": True}


def folder_with(folder: Path, tokenizer_config: dict[str, Any], **files: dict[str, Any]) -> Path:
    byte_level()._tokenizer.save(str(folder / "tokenizer.json"))
    contents = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}, **files}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {str(SIZE): NEW, str(SIZE + 1): EXTRA}}, {}),
        ({"added_tokens_decoder": {str(SIZE + 9): NEW, str(SIZE + 5): EXTRA}}, {}),
        ({"added_tokens_decoder": {str(SIZE): NEW}, "pad_token": "<pad>"}, {}),
        ({"added_tokens_decoder": {str(SIZE): EXTRA}, "eos_token": "<extra>"}, {}),
        ({"added_tokens_decoder": {"258": {"content": "hello", "special": False}}}, {}),
        ({}, {"added_tokens": {"<extra>": SIZE + 1, "<|new|>": SIZE}}),
        ({"additional_special_tokens": ["<|new|>"]}, {"added_tokens": {"<extra>": SIZE + 1, "<|new|>": SIZE}}),
        ({}, {"added_tokens": {"<|new|>": SIZE}, "special_tokens_map": {"pad_token": {"content": "<pad>"}}}),
        ({"pad_token": "<pad>", "additional_special_tokens": ["<|new|>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<|new|>"}, "eos_token": "</s>"}, {}),
        ({"eos_token": "</s>"}, {}),
    ],
)
def test_ids_are_those_of_transformers(config: dict[str, Any], files: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config, **files)
    expected = AutoTokenizer.from_pretrained(folder)
    ids = expected.encode(TEXT, add_special_tokens=False)
    special = {place: token.content for place, token in expected.added_tokens_decoder.items() if token.special}
    served = load_tokenizer(folder, TokenizerConfig())
    assert served.encode(TEXT, add_special_tokens=False).ids == ids
    assert served.special_tokens == special
    assert served.decode(ids) == expected.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer_of(folder).encode(TEXT, add_special_tokens=False).ids == ids
    assert Tokenizer.from_str(read_definition(folder)).encode(TEXT, add_special_tokens=False).ids == ids


def test_a_tokenizer_that_lacks_none_is_left_as_it_is(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}})
    assert not add_missing_tokens(byte_level()._tokenizer, folder)
    assert read_definition(folder) == (folder / "tokenizer.json").read_text()


@pytest.mark.parametrize("config", [{"vocab_size": SIZE + 1}, {"text_config": {"vocab_size": SIZE + 1}}])
def test_tokens_that_the_model_does_not_know_are_left_out(config: dict[str, Any], tmp_path: Path) -> None:
    tokens = {str(SIZE): NEW, str(SIZE + 1): EXTRA, "258": {"content": "hello"}}
    folder = folder_with(tmp_path, {"added_tokens_decoder": tokens}, config=config)
    served = load_tokenizer(folder, TokenizerConfig())
    assert served.vocab_size == SIZE + 1
    assert set(served.added_tokens.values()) == {"<s>", "</s>", "<|new|>", "hello"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": ["<|new|>"]}, r"added_tokens_decoder is \['<\|new\|>'\]; an object is needed"),
        ({"added_tokens_decoder": {"x": NEW}}, "'x' is not the id of an added token"),
        ({"added_tokens_decoder": {"9": "<|new|>"}}, r"added_tokens_decoder\.9 is '<\|new\|>'; an object is needed"),
        ({"added_tokens_decoder": {"9": {"special": True}}}, r"added_tokens_decoder\.9 has no `content`"),
    ],
)
def test_what_is_no_token_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=message):
        load_tokenizer(folder_with(tmp_path, config), TokenizerConfig())
