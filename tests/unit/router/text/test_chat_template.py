from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tgi_server import demo_model
from tgi_server.router.answers.tools import TGI_TOOL_PROMPT, ToolSpec, ToolUse
from tgi_server.router.api.routes.chat_prompt import conversation_of
from tgi_server.router.errors import InvalidRequest, InvalidTemplate, StartupError
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.text import template_allowance
from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.conversation import render_conversation
from tgi_server.router.text.tokenizer_config import TokenizerConfig, read_tokenizer_config

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def template(source: str = CHATML, **others: str) -> ChatTemplate:
    return ChatTemplate(
        TokenizerConfig({"bos_token": "<s>", "eos_token": "</s>"}, chat_templates={"default": source, **others})
    )


def test_a_conversation():
    assert template().render(HELLO, None) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_are_known_to_the_template():
    assert template("{{ bos_token }}|{{ eos_token }}").render(HELLO, None) == "<s>|</s>"
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<m>"}
    source = "{{ pad_token }}{{ unk_token }}{{ mask_token }}{{ bos_token + 'x' }}{{ cls_token is defined }}"
    assert ChatTemplate(TokenizerConfig(named, chat_templates={"default": source})).render(HELLO, None) == (
        "<pad><unk><m>xFalse"
    )


def test_a_last_message_of_the_assistant_is_left_open():
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nWell,"
    assert template().render(messages, None) == expected


def test_templates_may_refuse():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidTemplate, match="roles must alternate"):
        template(source).render(HELLO, None)


def test_templates_may_trip():
    with pytest.raises(InvalidTemplate, match="cannot render"):
        template("{{ messages[0]['content'] + 3 }}").render(HELLO, None)


def test_a_model_without_a_template_is_told():
    with pytest.raises(InvalidTemplate, match="--tokenizer-config-path"):
        ChatTemplate(TokenizerConfig()).render(HELLO, None)


def test_no_messages():
    with pytest.raises(InvalidTemplate, match="must not be empty"):
        template().render([], None)


def test_a_template_that_is_not_jinja_is_told_at_start_up():
    with pytest.raises(StartupError, match="not valid Jinja in line 2: "):
        template("\n{% for %}")


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


VALUE = {"b": "<größe> 'x' & \"y\" 🌳\u2028", "a": [1, 2.5, None, True, {}], "\ue000": {"z": "é", "c": []}}
# Each shows VALUE as `content`.
TO_JSON = [
    *(
        f"{{{{ content | tojson{options} }}}}"
        for options in (
            "",
            "()",
            "(ensure_ascii=False)",
            "(ensure_ascii=True)",
            "(False)",
            "(True)",
            "(False, 2)",
            "(indent=4)",
            "(indent='--')",
            "(ensure_ascii=False, indent=None)",
            "(separators=(',', ':'))",
            "(False, None, (',', ':'), True)",
            "(sort_keys=True)",
            "(True, 1, (' , ', ' : '), sort_keys=True)",
        )
    ),
    "{% for name, value in content.items() %}{{ name }}={{ value | tojson(ensure_ascii=False) }};{% endfor %}",
    "{% macro show(x) %}{{ x | tojson(True, indent=1) }}{% endmacro %}{{ show(content) }}{{ show([content]) }}",
    "{{ content.values() | map('tojson', ensure_ascii=False) | join('|') }}",
    "{{ content | tojson(ensure_ascii=False) | replace(' ', '') | upper | length }}",
    "{{ [content, content] | map('tojson', True) | list | tojson }}",
    "{{ '<' ~ content | tojson(sort_keys=true) ~ '>' }}",
    "{% set shown = content | tojson(ensure_ascii=False, separators=(',', ': ')) %}{{ shown | trim }}",
    "{{ content.a | tojson if content.a is not string else content.a }}",
    "{% filter trim %}{{ content.b | tojson }}{% endfilter %}",
    "{% call(x) caller_of(content) %}{{ x | tojson(False, 3) }}{% endcall %}",
]


@pytest.mark.parametrize("source", TO_JSON)
def test_json_is_that_of_transformers(source: str):
    macro = "{% macro caller_of(x) %}{{ caller(x) }}{% endmacro %}{% set content = messages[0].content %}"
    messages: list[dict[str, Any]] = [{"role": "tool", "content": VALUE}]
    ((expected,), _) = render_jinja_template([messages], chat_template=macro + source)
    assert template(macro + source).render([*messages, *HELLO], None) == expected


@pytest.mark.parametrize("options", ["1, 2, (3, 4), 5, 6", "default=4", "False, ensure_ascii=True"])
def test_what_json_cannot_be_made_of_is_told(options: str):
    with pytest.raises(InvalidTemplate, match="cannot render"):
        template(f"{{{{ messages | tojson({options}) }}}}").render(HELLO, None)


def test_an_answer_that_is_gone_on_with_may_be_shown_as_ascii():
    source = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}\n{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "größe \ue000"}]
    assert template(source).render(messages, None) == '"Hello"\n"gr\\u00f6\\u00dfe \\ue000'


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
    monkeypatch.setattr(template_allowance, "RENDER_SECONDS", 0.2)
    source = "{% for m in messages %}{% for n in messages %}{% for o in messages %}{% endfor %}{% endfor %}{% endfor %}"
    assert template(source).render(HELLO, None) == ""
    with pytest.raises(InvalidTemplate, match=r"more than 0\.2 s"):
        template(source).render(HELLO * 1_000, None)


def test_a_long_last_message_that_the_template_changes_takes_no_longer():
    """Searching for it from the end, character by character, would take minutes."""
    thought = [{"role": "user", "content": "a" * 600_000}, {"role": "assistant", "content": "a<t>" + "a" * 300_000}]
    source = "{% for m in messages %}{{ m.content.split('<t>')[-1] }}{% endfor %}"
    assert template(source).render(thought, None) == "a" * 900_000


PLAIN = "{% for message in messages %}{{ message | tojson }}{% if not loop.last %}\n{% endif %}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson if tools }}#" + PLAIN
CALL = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CLOCK = ToolSpec("clock", "Tells the time.")


def render(
    *messages: dict[str, Any],
    source: str = PLAIN,
    tools: bool = False,
    tool_prompt: str | None = None,
    usual: str = "",
    **fields: Any,
) -> str:
    template = ChatTemplate(TokenizerConfig(chat_templates={"default": source}))
    request = ChatRequest.model_validate({"messages": list(messages), "tool_prompt": tool_prompt, **fields})
    conversation = replace(conversation_of(request), use=ToolUse([CLOCK] if tools else []))
    return render_conversation(template, conversation, tool_prompt=usual).text


@pytest.mark.parametrize("text", ["e", "<", "|im_", ">\n<", "Well \ue000"])
def test_an_answer_that_is_gone_on_with_may_look_like_what_ends_it(text: str):
    shown = render(*HELLO, {"role": "assistant", "content": text}, source=CHATML)
    assert shown == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{text}"


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("fields", [{}, {"continue_final_message": True, "add_generation_prompt": False}])
def test_a_blank_last_message_of_the_assistant_opens_its_turn(content: Any, fields: dict[str, Any]):
    blank = {"role": "assistant", "content": content}
    opened = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render(*HELLO, blank, source=CHATML, **fields) == opened
    answered = opened + "Well<|im_end|>\n<|im_start|>assistant\n"
    assert render(*HELLO, {"role": "assistant", "content": "Well"}, blank, source=CHATML, **fields) == answered


def test_tools_are_told_before_a_blank_last_message():
    shown = render(*HELLO, {"role": "assistant", "content": ""}, source=CHATML, tools=True)
    assert shown.startswith("<|im_start|>user\nHello\n---\n[{")
    assert shown.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("said", [{"reasoning_content": "Hm."}, {"tool_calls": [CALL]}], ids=str)
def test_a_last_message_of_the_assistant_without_text_may_say_something_else(said: dict[str, Any]):
    shown = render(*HELLO, {"role": "assistant", "content": "", **said}, source=PLAIN + "{{ add_generation_prompt }}")
    (name,) = said
    assert f'"{name}": ' in shown
    assert shown.endswith("True")


def test_a_blank_last_message_of_the_assistant_may_be_its_whole_turn():
    shown = render(*HELLO, {"role": "assistant", "content": ""}, source=CHATML, continue_final_message=False)
    assert shown.endswith("<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n")


def test_text_in_parts_is_one_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render({"role": "user", "content": parts}) == '{"role": "user", "content": "one two"}'


# Templates that take content as a list; each shows the role before the parts.
IN_PARTS = {
    "a loop": "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}|{% endif %}{% endfor %}{% endfor %}",
    "by an alias": "{% for m in messages %}{% set parts = m['content'] %}[{{ m['role'] }}]"
    "{% for part in parts | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}|{% endfor %}{% endfor %}",
    "the first part is looked at": "{% for m in messages %}[{{ m.role }}]"
    "{% if m['content'][0]['type'] == 'image' %}:{% endif %}"
    "{% for line in m['content'] %}{{ line['text'] }}|{% endfor %}{% endfor %}",
    "a macro": "{% macro show(content) %}{% for part in content %}{{ part.text }}|{% endfor %}{% endmacro %}"
    "{% for m in messages %}[{{ m.role }}]{{ show(m.content) }}{% endfor %}",
    "it refuses texts": "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ raise_exception('parts!') }}{% endif %}"
    "{{ m.content | map(attribute='text') | join('|') }}|{% endfor %}",
}


@pytest.mark.parametrize("source", IN_PARTS.values(), ids=IN_PARTS)
def test_content_is_a_list_where_the_template_reads_it_so(source: str):
    system = {"role": "developer", "content": "Be kind."}
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    answer, blank = {"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": []}
    result = {"role": "tool", "tool_call_id": "a", "content": "12:00"}
    said = [system, *HELLO, answer, result, {"role": "user", "content": parts}, blank]
    shown = render(*said, source=source).replace("|", "")
    assert shown == "[system]Be kind.[user]Hello[assistant][tool]12:00[user]one two[user]"
    begun = [*HELLO, {"role": "assistant", "content": "Well, "}]
    assert render(*begun, source=source) == "[user]Hello|[assistant]Well,"
    assert render(*HELLO, source=source, tools=True).startswith("[user]Hello|\n---\n[{")
    assert render(*HELLO, {"role": "assistant", "content": ""}, source=source) == "[user]Hello|"


def test_content_is_a_list_in_the_roles_in_which_the_template_reads_it_so():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% elif m.role == 'assistant' and m.tool_calls %}{{ raise_exception('no tools') }}"
        "{% else %}{{ m.content | trim | upper }}{% endif %}{% endfor %}"
    )
    said = [{"role": "system", "content": "be "}, *HELLO, {"role": "assistant", "content": "kind"}]
    assert render(*said, source=source) == "BEHelloKIND"


def test_content_is_a_text_where_the_template_reads_both():
    source = (
        "{% for m in messages %}{% if m.content is string %}text {{ m.content }}"
        "{% else %}{% for part in m.content %}part {{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render({"role": "user", "content": parts}, source=source) == "text one two"


def test_each_template_of_a_model_is_looked_at():
    (first, *_) = IN_PARTS.values()
    both = ChatTemplate(TokenizerConfig(chat_templates={"default": first, "tool_use": PLAIN}))
    assert both.reads_parts("user", tools=False)
    assert not both.reads_parts("user", tools=True)


def test_images_stand_where_they_are_in_a_message():
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    content = [{"type": "text", "text": "this"}, image, {"type": "text", "text": "and that"}, image]
    source = (
        "{% for p in messages[0].content %}{% if p.type == 'image' %}<img>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    )
    assert render({"role": "user", "content": content}, source=source) == "this<img>and that<img>"
    template = ChatTemplate(TokenizerConfig(chat_templates={"default": f"user: {source} end"}))
    assert template.image_text("<img>") == "<img>"


def test_names_and_tool_results_are_kept():
    shown = render({"role": "tool", "content": "12:00", "tool_call_id": "a", "name": "clock"})
    assert shown == '{"role": "tool", "content": "12:00", "name": "clock", "tool_call_id": "a"}'


@pytest.mark.parametrize("arguments", ['{"zone": "UTC"}', {"zone": "UTC"}])
def test_arguments_of_earlier_calls_are_objects(arguments: Any):
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    shown = render({"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "and?"})
    assert '"function": {"name": "clock", "arguments": {"zone": "UTC"}}' in shown


# Templates that show arguments as they are, as JSON, and one by one.
OF_ARGUMENTS = {
    "as text": "{% if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}",
    "as JSON": "{{ arguments | tojson }}",
    "one by one": "{% for name, value in arguments | items %}{{ {name: value} | tojson }}{% else %}{}{% endfor %}",
}


@pytest.mark.parametrize("source", OF_ARGUMENTS.values(), ids=OF_ARGUMENTS)
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        (" ", "{}"),
        ("{", "{}"),
        ('{"zo', "{}"),
        ('{"zone": tr', "{}"),
        ('{"zone": "U', '{"zone": "U"}'),
        ('{"zone": "U\\ud83d', '{"zone": "U"}'),
        ('{"zones": [1, {"a": 2}, ', '{"zones": [1, {"a": 2}]}'),
    ],
)
def test_arguments_of_earlier_calls_may_be_absent_or_cut_off(source: str, arguments: str, shown: str):
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    source = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + source
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1", "tool_call_id": "a"}]
    assert render(*messages, source=source) == shown


@pytest.mark.parametrize("shown", ["{{ arguments }}", "{{ '(' + arguments + ')' }}", "{{ arguments | trim }}"])
@pytest.mark.parametrize("arguments", ['{"zone":"größe"}', {"zone": "größe"}])
def test_arguments_are_text_where_the_template_reads_them_so(shown: str, arguments: Any):
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    source = "{% set arguments = messages[-1].tool_calls[0].function.arguments %}" + shown
    said = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    assert render(*said, source=source).strip("()") == '{"zone": "größe"}'


def test_arguments_are_text_beside_content_in_parts():
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts!') }}{% endif %}"
        "{{ m.content[0].text }}{% for c in m.tool_calls %}{{ '(' + c.function.arguments + ')' }}{% endfor %}"
        "{% endfor %}"
    )
    assert render(*HELLO, {"role": "assistant", "tool_calls": [CALL]}, source=source) == "Hello({})"


@pytest.mark.parametrize("arguments", ["zone", "{'zone': 1}", '{"zone" 1', '{"zone": 1} {"zone": 2}'])
def test_arguments_that_are_no_json_are_refused(arguments: str):
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="not JSON"):
        render({"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "and?"})


def test_a_template_that_knows_tools_tells_them_itself():
    shown = render({"role": "user", "content": "time?"}, source=WITH_TOOLS, tools=True)
    assert shown.startswith('[{"type": "function", "function": {"name": "clock", "description": "Tells the time."')
    assert shown.endswith('#{"role": "user", "content": "time?"}')


def test_otherwise_the_last_message_tells_them():
    shown = render({"role": "user", "content": "time?"}, tools=True, usual=TGI_TOOL_PROMPT)
    assert "time?\\n---\\n[{" in shown
    assert "clock" in shown
    assert "JSON" in shown


def test_the_tool_prompt_may_be_another():
    for source in (PLAIN, WITH_TOOLS):
        shown = render({"role": "user", "content": "time?"}, source=source, tools=True, tool_prompt="Call one!")
        assert "Call one!" in shown
