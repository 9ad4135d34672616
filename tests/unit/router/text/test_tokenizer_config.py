import json
from pathlib import Path

import pytest

from tgi_server.router.errors import StartupError
from tgi_server.router.text.tokenizer_config import read_tokenizer_config


def write(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_model_without_the_file_has_neither_tokens_nor_template(tmp_path: Path):
    config = read_tokenizer_config(tmp_path, None)
    assert config.bos_token is None
    assert config.chat_templates == {}


def test_tokens_are_strings_or_objects(tmp_path: Path):
    write(tmp_path, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False}, add_bos_token=True)
    config = read_tokenizer_config(tmp_path, None)
    assert (config.bos_token, config.eos_token) == ("<s>", "</s>")
    assert config.tokenizer_class == "PreTrainedTokenizerFast"
    assert (config.add_bos_token, config.add_eos_token) == (True, None)


def test_tokens_may_be_named_in_an_older_file(tmp_path: Path):
    older = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    write(tmp_path, eos_token="<end>", add_bos_token=True)
    config = read_tokenizer_config(tmp_path, None)
    assert (config.bos_token, config.eos_token) == ("<s>", "<end>")
    write(tmp_path, bos_token=None)
    assert read_tokenizer_config(tmp_path, None).tokens == {"eos_token": "</s>", "pad_token": "<pad>"}


def test_one_template_or_several(tmp_path: Path):
    write(tmp_path, chat_template="one")
    assert read_tokenizer_config(tmp_path, None).chat_templates == {"default": "one"}
    write(tmp_path, chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    assert read_tokenizer_config(tmp_path, None).chat_templates == {"default": "a", "tool_use": "b"}


def test_template_files_win(tmp_path: Path):
    write(tmp_path, chat_template="inline")
    (tmp_path / "chat_template.jinja").write_text("of the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert read_tokenizer_config(tmp_path, None).chat_templates == {"default": "of the file", "tool_use": "tools"}


def test_models_that_read_images_have_their_template_in_a_file_of_json(tmp_path: Path):
    write(tmp_path, bos_token="<s>")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of images"}))
    assert read_tokenizer_config(tmp_path, None).chat_templates == {"default": "of images"}
    write(tmp_path, chat_template="of texts")
    assert read_tokenizer_config(tmp_path, None).chat_templates == {"default": "of texts"}


def test_another_config_replaces_the_models(tmp_path: Path):
    write(tmp_path, bos_token="<s>", chat_template="of the model")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"bos_token": "<b>", "chat_template": "of the other"}))
    config = read_tokenizer_config(tmp_path, other)
    assert (config.bos_token, config.chat_templates["default"]) == ("<b>", "of the other")


def test_a_bare_template_keeps_the_models_tokens(tmp_path: Path):
    write(tmp_path, bos_token="<s>", chat_template="of the model")
    other = tmp_path / "template.jinja"
    other.write_text("bare")
    config = read_tokenizer_config(tmp_path, other)
    assert (config.bos_token, config.chat_templates) == ("<s>", {"default": "bare"})


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_is_no_tokenizer_config_is_named(tmp_path: Path, content: str):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer_config\.json is not"):
        read_tokenizer_config(tmp_path, None)


@pytest.mark.parametrize("templates", [["default"], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_templates_that_are_none_are_told(tmp_path: Path, templates: object):
    write(tmp_path, chat_template=templates)
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: `chat_template` [^\n]*$"):
        read_tokenizer_config(tmp_path, None)


def test_a_config_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(StartupError, match=r"cannot read .*absent\.json"):
        read_tokenizer_config(tmp_path, tmp_path / "absent.json")
