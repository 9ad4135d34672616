from datetime import datetime

import pytest

from tgi_server import demo_model
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
