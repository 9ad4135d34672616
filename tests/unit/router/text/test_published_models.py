"""The files of models as they are published are read, and what they say is found out."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.published_tokenizers import PUBLISHED, Published
from tgi_server.router.answers.formats import tool_format
from tgi_server.router.answers.reasoning import reasoning_tags
from tgi_server.router.api.routes.chat_prompt import conversation_of
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.conversation import render_conversation
from tgi_server.router.text.tokenizer import load_tokenizer
from tgi_server.router.text.tokenizer_config import read_tokenizer_config

TEXT = 'say "größe 🌳" <b>x</b>\n\n{"a": "b"}'
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What of Paris?"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "And Rome?"},
]
PARAMETERS = {"type": "object", "properties": {"größe": {"type": "string", "enum": ["<a>", "é"]}}, "required": []}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "It's <b>.", "parameters": PARAMETERS}}
ARGUMENTS = '{"place": "Rome", "n": [1]}'  # DeepSeek's templates take them as text, others as an object
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": json.loads(ARGUMENTS)}}
WITH_CALLS = [
    {"role": "user", "content": "What of Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 °C", "tool_call_id": "abcdefghi", "name": "look_up"},
    {"role": "assistant", "content": "It is warm."},
    {"role": "user", "content": "And Rome?"},
]


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["without tools", "with tools"])
def test_prompts_are_those_of_transformers(published: Published, tools: list[dict[str, Any]] | None, tmp_path: Path):
    config = read_tokenizer_config(published.save(tmp_path), None)
    template = ChatTemplate(config)
    # Other templates have them told in the last message.
    asked = tools if template.shows_tools() else None
    names = {"bos_token": published.bos, "eos_token": published.eos, "pad_token": published.pad}
    named = {name: token for name, token in (names | {"unk_token": published.unk}).items() if token is not None}
    shown = 0
    for messages in (MESSAGES, WITH_CALLS):
        request = ChatRequest.model_validate({"messages": messages, "tools": asked})
        if published.calls in ("deepseek_v3", "deepseek_v31"):
            messages = json.loads(json.dumps(messages).replace(ARGUMENTS, json.dumps(ARGUMENTS)))
        if tools and published.calls == "phi4_mini":  # whose template reads them in the system's message
            system = {"role": "system", "content": "You are a helpful assistant with some tools."}
            first, *rest = messages if messages[0]["role"] == "system" else [system, *messages]
            messages = [{**first, "tools": json.dumps([TOOL["function"]], ensure_ascii=False)}, *rest]
        try:
            ((expected,), _) = render_jinja_template(
                [messages], tools, chat_template=published.template, add_generation_prompt=True, **named
            )
        except TemplateError:  # as of Gemma's, which knows no calls
            continue
        assert render_conversation(template, conversation_of(request)).text == expected
        shown += 1
    assert shown


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
