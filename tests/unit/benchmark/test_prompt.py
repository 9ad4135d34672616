import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from shared.stubs import generate_pb2 as pb
from tests.fakes.vocabularies import byte_level
from tgi_server.benchmark import prompt


def test_tokens_that_only_the_configuration_adds_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    tokenizer._tokenizer.save(str(tmp_path / "tokenizer.json"))
    added = {str(tokenizer.vocab_size): {"content": "<|new|>", "special": True}}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    monkeypatch.setattr(prompt, "TEXT", "a<|new|>b")
    info = pb.InfoResponse(vocab_size=tokenizer.vocab_size + 1)
    expected = AutoTokenizer.from_pretrained(tmp_path).encode("a<|new|>b", add_special_tokens=False)
    assert prompt.prompt_tokens(info, str(tmp_path), "main") == expected
