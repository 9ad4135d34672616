"""The files of models as they are published are read, and what they say is found out."""

from pathlib import Path

import pytest

from tests.published_tokenizers import PUBLISHED, Published
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.reasoning import reasoning_tags
from tgi_server.router.text.tokenizer import load_tokenizer
from tgi_server.router.text.tokenizer_config import read_tokenizer_config
from tgi_server.router.text.tool_formats import tool_format

TEXT = 'say "größe 🌳" <b>x</b>\n\n{"a": "b"}'
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What of Paris?"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "And Rome?"},
]


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
def test_the_files_of_a_model_are_read(published: Published, tmp_path: Path):
    folder = published.save(tmp_path)
    config = read_tokenizer_config(folder, None)
    assert (config.bos_token, config.eos_token) == (published.bos, published.eos)
    tokenizer = load_tokenizer(folder, config)
    entries = published.definition["added_tokens"]
    assert tokenizer.special_tokens == {each["id"]: each["content"] for each in entries if each["special"]}
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False).ids).lstrip() == TEXT
    first = tokenizer.encode(TEXT, add_special_tokens=True).ids[0]
    assert published.bos is None or (first == published.token_id(published.bos)) == published.adds_bos
    template = ChatTemplate(config)
    assert tool_format("auto", template.source).name == published.calls
    assert (reasoning_tags("auto", template.source) is not None) == published.thinks
    prompt = template.render(MESSAGES, None)
    assert all(message["content"] in prompt for message in MESSAGES)
