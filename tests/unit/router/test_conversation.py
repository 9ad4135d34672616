from typing import Any

import pytest

from tgi_server.router.chat_template import ChatTemplate
from tgi_server.router.conversation import render_conversation
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import Message, Tool
from tgi_server.router.tokenizer_config import TokenizerConfig

PLAIN = "{% for message in messages %}{{ message | tojson }}{% if not loop.last %}\n{% endif %}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson if tools }}#" + PLAIN
CLOCK = Tool.model_validate({"type": "function", "function": {"name": "clock", "description": "Tells the time."}})


def render(*messages: dict[str, Any], source: str = PLAIN, tools: bool = False, tool_prompt: str | None = None) -> str:
    template = ChatTemplate(TokenizerConfig(chat_templates={"default": source}))
    return render_conversation(
        template, [Message.model_validate(message) for message in messages], [CLOCK] if tools else [], tool_prompt
    ).text


def test_text_in_parts_is_one_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render({"role": "user", "content": parts}) == '{"role": "user", "content": "one two"}'


def test_images_are_refused():
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(InvalidRequest, match="images"):
        render({"role": "user", "content": image})


def test_names_and_tool_results_are_kept():
    shown = render({"role": "tool", "content": "12:00", "tool_call_id": "a", "name": "clock"})
    assert shown == '{"role": "tool", "content": "12:00", "name": "clock", "tool_call_id": "a"}'


@pytest.mark.parametrize("arguments", ['{"zone": "UTC"}', {"zone": "UTC"}])
def test_arguments_of_earlier_calls_are_objects(arguments: Any):
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    shown = render({"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "and?"})
    assert '"function": {"name": "clock", "arguments": {"zone": "UTC"}}' in shown


def test_arguments_that_are_no_json_are_refused():
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{"}}
    with pytest.raises(InvalidRequest, match="not JSON"):
        render({"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "and?"})


def test_a_template_that_knows_tools_tells_them_itself():
    shown = render({"role": "user", "content": "time?"}, source=WITH_TOOLS, tools=True)
    assert shown.startswith('[{"type": "function", "function": {"name": "clock", "description": "Tells the time."')
    assert shown.endswith('#{"role": "user", "content": "time?"}')


def test_otherwise_the_last_message_tells_them():
    shown = render({"role": "user", "content": "time?"}, tools=True)
    assert "time?\\n---\\n[{" in shown
    assert "clock" in shown
    assert "JSON" in shown


def test_the_tool_prompt_may_be_another():
    for source in (PLAIN, WITH_TOOLS):
        shown = render({"role": "user", "content": "time?"}, source=source, tools=True, tool_prompt="Call one!")
        assert "Call one!" in shown
