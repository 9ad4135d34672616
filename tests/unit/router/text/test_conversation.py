"""Conversations become what the model's template can show."""

from pathlib import Path
from typing import Any

import pytest

from tests.published_tokenizers import PUBLISHED
from tgi_server.router.api.routes.chat_prompt import conversation_of
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.conversation import render_conversation
from tgi_server.router.text.tokenizer_config import TokenizerConfig, read_tokenizer_config

SHOW = "[{{ m.role }}]{{ m.content }}"
# Templates that show instructions only as the first message: refused, dropped or shown elsewhere if they come later.
FIRST_ONLY = {
    "refused": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + SHOW + "{% endfor %}",
    "dropped": "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}" + SHOW + "{% endif %}{% endfor %}",
    "alternating": "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + SHOW
    + "{% endfor %}",
    "in parts": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    "{% endif %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
}
IN_PLACE = "{% for m in messages %}" + SHOW + "{% endfor %}"
TWO_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'developer') and not loop.first %}{{ raise_exception('no') }}"
    "{% endif %}" + SHOW + "{% endfor %}"
)
OLD_AND_NEW = [("system", "A"), ("developer", "B"), ("user", "C")]


def render(source: str, *messages: tuple[str, str], **fields: Any) -> str:
    return render_with(ChatTemplate(TokenizerConfig(chat_templates={"default": source})), *messages, **fields)


def render_with(template: ChatTemplate, *messages: tuple[str, str], **fields: Any) -> str:
    said = [{"role": role, "content": text} for role, text in messages]
    request = ChatRequest.model_validate({"messages": said, **fields})
    return render_conversation(template, conversation_of(request)).text


@pytest.mark.parametrize("source", FIRST_ONLY.values(), ids=FIRST_ONLY)
def test_instructions_are_joined_where_the_template_shows_only_a_first_one(source: str):
    assert render(source, *OLD_AND_NEW) == "[system]A\n\nB[user]C"
    assert render(source, ("user", "A"), ("system", "B")) == "[system]B[user]A"
    later = [("developer", "A"), ("user", "B"), ("assistant", "C"), ("system", "D"), ("user", "E")]
    assert render(source, *later) == "[system]A\n\nD[user]B[assistant]C[user]E"
    assert render(source, ("user", "A"), ("system", "B"), ("user", "C")) == "[system]B[user]A\n\nC"


@pytest.mark.parametrize("source", [IN_PLACE, *FIRST_ONLY.values()])
def test_one_first_instruction_stays_as_it_is(source: str):
    assert render(source, ("system", "A"), ("user", "B")) == "[system]A[user]B"


def test_instructions_stay_where_they_are_if_the_template_shows_them_there():
    later = [("system", "A"), ("user", "B"), ("system", "C"), ("user", "D")]
    assert render(IN_PLACE, *later) == "[system]A[user]B[system]C[user]D"


def test_joined_instructions_have_the_role_of_the_first():
    assert render(TWO_ROLES, ("developer", "A"), ("system", "B"), ("user", "C")) == "[developer]A\n\nB[user]C"


def test_an_answer_before_instructions_that_are_moved_is_not_continued():
    source = FIRST_ONLY["refused"] + "{% if add_generation_prompt %}[assistant]{% endif %}"
    said = [("user", "A"), ("assistant", "B "), ("system", "C")]
    assert render(source, *said) == "[system]C[user]A[assistant]B [assistant]"


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
def test_every_published_template_shows_all_instructions(published: Any, tmp_path: Path):
    template = ChatTemplate(read_tokenizer_config(published.save(tmp_path), None))
    prompt = render_with(template, *OLD_AND_NEW, ("assistant", "Well."), ("system", "Be brief."), ("user", "Go on."))
    assert all(text in prompt for text in ("A", "B", "C", "Be brief.", "Go on."))


def test_a_tools_result_has_the_name_of_the_call_with_its_id():
    source = "{% for m in messages %}[{{ m.role }}{% if m.role == 'tool' %}:{{ m.name or raise_exception('name') }}"
    source += "{% endif %}]{{ m.content }}{% endfor %}"

    def call(id_: str, name: str) -> dict[str, Any]:
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}

    request = {
        "messages": [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "", "tool_calls": [call("1", "clock"), call("2", "weather")]},
            {"role": "tool", "tool_call_id": "2", "content": "rain"},
            {"role": "tool", "tool_call_id": "1", "content": "noon", "name": "its own"},
            {"role": "assistant", "content": "", "tool_calls": [call("1", "weather")]},
            {"role": "tool", "tool_call_id": "1", "content": "sun"},
        ]
    }
    conversation = conversation_of(ChatRequest.model_validate(request))
    template = ChatTemplate(TokenizerConfig(chat_templates={"default": source}))
    shown = "[user]A[assistant][tool:weather]rain[tool:its own]noon[assistant][tool:weather]sun"
    assert render_conversation(template, conversation).text == shown
