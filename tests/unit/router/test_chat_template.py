from datetime import datetime

import pytest

from tgi_server import demo_model
from tgi_server.router import chat_template
from tgi_server.router.chat_template import ChatTemplate
from tgi_server.router.errors import InvalidTemplate, StartupError
from tgi_server.router.tokenizer_config import TokenizerConfig, read_tokenizer_config

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def template(source: str = CHATML, **others: str) -> ChatTemplate:
    return ChatTemplate(
        TokenizerConfig(bos_token="<s>", eos_token="</s>", chat_templates={"default": source, **others})
    )


def test_a_conversation():
    assert template().render(HELLO, None) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_are_known_to_the_template():
    assert template("{{ bos_token }}|{{ eos_token }}").render(HELLO, None) == "<s>|</s>"


def test_a_last_message_of_the_assistant_is_left_open():
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nWell,"
    assert template().render(messages, None) == expected


def test_templates_may_refuse():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidTemplate, match="roles must alternate"):
        template(source).render(HELLO, None)


def test_templates_may_trip():
    with pytest.raises(InvalidTemplate, match="cannot show"):
        template("{{ messages[0]['content'] + 3 }}").render(HELLO, None)


def test_a_model_without_a_template_is_told():
    with pytest.raises(InvalidTemplate, match="--tokenizer-config-path"):
        ChatTemplate(TokenizerConfig()).render(HELLO, None)


def test_no_messages():
    with pytest.raises(InvalidTemplate, match="must not be empty"):
        template().render([], None)


def test_what_is_no_template_is_told_at_start_up():
    with pytest.raises(StartupError, match="not valid Jinja"):
        template("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_are_in_a_sandbox(source: str):
    with pytest.raises(InvalidTemplate):
        template(source).render(HELLO, None)


def test_what_templates_of_the_hub_use():
    source = (
        "{%- for message in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {%- generation %}{{ message | tojson }}{% endgeneration %}\n{%- endfor %} {{ strftime_now('%Y') }}"
    )
    rendered = template(source).render([*HELLO, *HELLO], None)
    assert rendered == f'{{"role": "user", "content": "Hello"}} {datetime.now().year}'


def test_json_is_not_escaped_for_html():
    assert template("{{ messages[0] | tojson }}").render([{"role": "user", "content": "<é>"}], None).endswith('"<é>"}')


def test_a_template_of_its_own_for_tools():
    both = template("plain", tool_use="tools: {{ tools | length }}")
    assert both.render(HELLO, None) == "plain"
    assert both.render(HELLO, [{"type": "function"}]) == "tools: 1"
    assert both.shows_tools()
    assert not template().shows_tools()


def test_the_demo_models_template():
    demo = ChatTemplate(read_tokenizer_config(demo_model.PATH, None))
    assert demo.render(HELLO, None) == "<|bos|><|user|>Hello<|assistant|>"
    assert demo.shows_tools()


LOOPS = {
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}": "1/2,2/2.",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}": "Hellothere",
    "{% for m in [] %}{% else %}none{% endfor %}{% for m in absent %}x{% endfor %}": "none",
    "{% for k, v in messages[0].items() %}{{ k }}={{ loop.nextitem[0] if loop.nextitem }};{% endfor %}": "role=content;"
    "content=;",
    "{% macro all(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}{{ all('ab') }}": "ab",
    "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}": "12",
    "{% for x in range(9) %}{% if x == 1 %}{% continue %}{% elif x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}": (
        "02"
    ),
}


@pytest.mark.parametrize("source", LOOPS)
def test_loops_are_jinjas_own(source: str):
    assert template(source).render([*HELLO, {"role": "user", "content": "there"}], None) == LOOPS[source]


def test_a_template_that_loops_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    source = "{% for m in messages %}{% for n in messages %}{% for o in messages %}{% endfor %}{% endfor %}{% endfor %}"
    assert template(source).render(HELLO, None) == ""
    with pytest.raises(InvalidTemplate, match=r"more than 0\.2 s"):
        template(source).render(HELLO * 1_000, None)


def test_a_long_last_message_that_the_template_changes_takes_no_longer():
    """Searching for it from the end, character by character, would take minutes."""
    thought = [{"role": "user", "content": "a" * 600_000}, {"role": "assistant", "content": "a<t>" + "a" * 300_000}]
    source = "{% for m in messages %}{{ m.content.split('<t>')[-1] }}{% endfor %}"
    assert template(source).render(thought, None) == "a" * 900_000
