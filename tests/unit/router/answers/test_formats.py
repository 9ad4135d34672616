"""Forms of calls: told apart by templates, bound by grammars, and read back."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.grammars import compiler_fault, preferring, takes
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.router.answers.formats import FORMAT_NAMES, NUMBER, ToolFormat, tool_format
from tgi_server.router.answers.free_form import free_form_input, free_form_tool
from tgi_server.router.answers.reader import AnswerPart, AnswerReader
from tgi_server.router.answers.reasoning import REASONING_NAMES, reasoning_tags
from tgi_server.router.answers.tagged_arguments import ArgumentTags
from tgi_server.router.answers.tools import AnswerForm, ToolSpec, ToolUse
from tgi_server.router.api.routes.chat_prompt import tools_of
from tgi_server.router.errors import InvalidTool
from tgi_server.router.schemas.chat import ChatRequest

WEATHER = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
THINK = reasoning_tags("qwen3", "")
OPEN = "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>"
AGAIN = "<\uff5ctool▁call▁begin\uff5c>"
SEP, END, LAST = "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
PARIS, ROME = '{"place": "Paris"}', '{"place": "Rome}\\""}'

DSML = (
    '<|CALLS>\n<|invoke name="weather">\n<|parameter name="place" string="true">Paris</|parameter>\n</|invoke>\n'
    '<|invoke name="a\\"b">\n<|parameter name="place" string="true">Rome}"</|parameter>\n</|invoke>\n</|CALLS>'
).replace("|", "\uff5cDSML\uff5c")
# Two calls, as models of each form write them.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": PARIS}\n</tool_call>\n'
    '<tool_call>\n{"name": "a\\"b", "arguments": ROME}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=place>\nParis\n</parameter>\n</function>\n</tool_call>"
    '\n<tool_call>\n<function=a"b>\n<parameter=place>\nRome}"\n</parameter>\n</function>\n</tool_call>',
    "glm45": "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
    '\n<tool_call>a"b\n<arg_key>place</arg_key>\n<arg_value>Rome}"</arg_value>\n</tool_call>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="place">Paris</parameter>\n</invoke>\n'
    '<invoke name="a\\"b">\n<parameter name="place">Rome}"</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm47": "<tool_call>weather<arg_key>place</arg_key><arg_value>Paris</arg_value></tool_call>"
    '\n<tool_call>a"b<arg_key>place</arg_key><arg_value>Rome}"</arg_value></tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=place>Paris</parameter>\n</function>\n"
    '</seed:tool_call>\n<seed:tool_call>\n<function=a"b>\n<parameter=place>Rome}"</parameter>\n</function>\n</seed:tool_call>',
    "gemma4": '<|tool_call>call:weather{place:<|"|>Paris<|"|>}<tool_call|>'
    '<|tool_call>call:a"b{place:<|"|>Rome}"<|"|>}<tool_call|>',
    "pythonic": '[weather(place="Paris"), a"b(place="Rome}\\"")]',
    "lfm2": '<|tool_call_start|>[weather(place="Paris"), a"b(place="Rome}\\"")]<|tool_call_end|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>PARIS"
    '<|tool_call_end|><|tool_call_begin|>functions.a"b:12<|tool_call_argument_begin|>ROME<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "olmo3": '<function_calls>weather(place="Paris")\na"b(place="Rome}\\"")</function_calls>',
    "deepseek_v32": DSML.replace("CALLS", "function_calls"),
    "deepseek_v4": DSML.replace("CALLS", "tool_calls"),
    "phi4_mini": '<|tool_call|>[{"name": "weather", "arguments": PARIS}, '
    '{"name": "a\\"b", "arguments": ROME}]<|/tool_call|>',
    "functools": 'functools[{"name": "weather", "arguments": PARIS}, {"name": "a\\"b", "arguments": ROME}]',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": PARIS}, {"name": "a\\"b", "arguments": ROME}]',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": PARIS}, {"name": "a\\"b", "arguments": ROME}]',
    "mistral_args": '[TOOL_CALLS]weather[ARGS]PARIS[TOOL_CALLS]a"b[ARGS]ROME',
    "llama3_json": '{"name": "weather", "parameters": PARIS}; {"name": "a\\"b", "parameters": ROME}',
    "deepseek_v3": f"{OPEN}function{SEP}weather\n```json\nPARIS\n```{END}\n"
    f'{AGAIN}function{SEP}a"b\n```json\nROME\n```{END}{LAST}',
    "deepseek_v31": f'{OPEN}weather{SEP}PARIS{END}{AGAIN}a"b{SEP}ROME{END}{LAST}',
    "functionary": '<function=weather>PARIS</function><function=a"b>ROME</function>',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>PARIS",
    "json": '{"name": "weather", "arguments": PARIS}{"name": "a\\"b", "arguments": ROME}',
    "tgi": '{"function": {"_name": "weather", "_arguments": PARIS}}',
}
# Forms of which an answer has one call.
ALONE = ("harmony", "tgi")
# Forms of calls that begin as texts may do.
BRACES = ("llama3_json", "json", "tgi", "pythonic")
WRITTEN = {name: text.replace("PARIS", PARIS).replace("ROME", ROME) for name, text in WRITTEN.items()}


def tool(name: str, parameters: Any = None, *, strict: bool | None = None) -> ToolSpec:
    return ToolSpec(name, parameters=parameters, strict=strict)


TOOLS = [tool("weather", WEATHER), tool('a"b', WEATHER), tool("clock")]
MAY, MUST, ONCE = ToolUse(TOOLS), ToolUse(TOOLS, required=True), ToolUse(TOOLS, required=True, parallel=False)


def written_calls(name: str) -> list[tuple[str, str]]:
    return [("weather", PARIS)] if name in ALONE else [("weather", PARIS), ('a"b', ROME)]


def read(make: Callable[[], AnswerReader] | None, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns thoughts, text and calls of an answer that comes in pieces of that size."""
    assert make is not None
    reader = make()
    pieces = [piece for start in range(0, len(text), size) for piece in reader.feed(text[start : start + size])]
    pieces += reader.end()
    told = {
        part: "".join(piece.text for piece in pieces if piece.part is part)
        for part in (AnswerPart.THOUGHT, AnswerPart.TEXT)
    }
    names = [piece.text for piece in pieces if piece.part is AnswerPart.CALL]
    arguments = [""] * len(names)
    for piece in pieces:
        if piece.part is AnswerPart.ARGUMENTS:
            arguments[piece.call] += piece.text
    assert reader.calls == len(names)
    return told[AnswerPart.THOUGHT], told[AnswerPart.TEXT], list(zip(names, arguments, strict=True))


def test_every_form_is_written_here():
    assert set(FORMAT_NAMES) == set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_bound_and_read_back(name: str):
    form, text, calls = AnswerForm(tool_format(name, ""), None, {}), WRITTEN[name], written_calls(name)
    for use in (MAY, MUST):
        grammar = form.grammar(use, None, thinking=False)
        assert takes(grammar, text)
        assert not takes(grammar, text.replace("place", "plane"))
        assert not takes(grammar, text[:-1]) or name in ("mistral_args",)
        unknown = text.replace("weather", "whether")
        assert takes(grammar, unknown) == (use is MAY and name in BRACES)
        assert takes(grammar, "Sunny, I think.") == (use is MAY)
        for size in (1, 2, 3, 7, 1000):
            assert read(form.readers(use, None, thinking=False), text, size) == ("", "", calls)
            if name in BRACES:
                assert read(form.readers(use, None, thinking=False), unknown, size) == ("", unknown, [])
    assert takes(form.grammar(ONCE, None, thinking=False), text) == (name in ALONE)


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ("{}", "{}"),
        (" {not", " {n"),
        ('{"a": 1}', '{"a'),
        ('{"name": "wet"}', '{"name": "wet'),
        ('{"name": "weathers"}', '{"name": "weathers'),
        ('{ "name":  3}', '{ "name":  3'),
        ('{"type": "function", "of": 3}', '{"type": "function", "o'),
        ('\n{\n\n"name": "weather"}', "\n{\n\n"),
        ('{"name": "weat', '{"name": "weat'),
    ],
)
def test_a_text_is_held_back_while_it_may_become_a_call(text: str, certain: str):
    form = AnswerForm(tool_format("llama3_json", ""), None, {})
    assert takes(form.grammar(MAY, None, thinking=False), text)
    make = form.readers(MAY, None, thinking=False)
    assert make is not None
    reader = make()
    fed = next((end for end in range(1, len(text) + 1) if reader.feed(text[end - 1 : end])), len(text))
    assert text[:fed] == certain
    for size in (1, 2, 3, 100):
        assert read(make, text, size) == ("", text, [])


@pytest.mark.parametrize("name", [name for name in BRACES if '"weather"' in WRITTEN[name]])
def test_the_layouts_of_a_call(name: str):
    form = AnswerForm(tool_format(name, ""), None, {})
    grammar = form.grammar(MAY, None, thinking=False)
    head, rest = WRITTEN[name].split('"weather"', 1)
    for layout in (head.replace(" ", ""), head.replace("{", "{ "), "\n" + head.replace("{", "{\n    ")):
        text = f'{layout}"weather"{rest}'
        assert takes(grammar, text)
        assert not takes(grammar, text.replace("place", "plane"))
        assert not takes(grammar, f'{layout}"weather"}}')
        for size in (1, 2, 3, 7, 1000):
            assert read(form.readers(MAY, None, thinking=False), text, size) == ("", "", written_calls(name))


def test_many_tools_beside_a_text():
    tools = [tool(f"näme({index})[a-z]/ \\d{{2}}.*", WEATHER) for index in range(500)]
    form = AnswerForm(tool_format("json", ""), None, {})
    grammar = form.grammar(ToolUse(tools), None, thinking=False)
    called = json.dumps(tools[77].name, ensure_ascii=False)
    assert takes(grammar, f'{{"name": {called}, "arguments": {PARIS}}}')
    assert not takes(grammar, f'{{"name": {called}}}')
    assert takes(grammar, '{"name": "näme(3)a/ 22"}')


@pytest.mark.parametrize("name", [name for name in WRITTEN if tool_format(name, "").anywhere])
def test_a_text_before_a_call(name: str):
    form = AnswerForm(tool_format(name, ""), None, {})
    text = f"I look it up <  \n\n{WRITTEN[name]}"
    assert takes(form.grammar(MAY, None, thinking=False), text)
    for size in (1, 2, 3, 7, 1000):
        told = read(form.readers(MAY, None, thinking=False), text, size)
        assert told == ("", "I look it up <", written_calls(name))


def events(make: Callable[[], AnswerReader] | None, parts: list[str]) -> list[tuple[AnswerPart, str, int, str]]:
    """Returns the pieces of an answer that comes in these parts, with neighbours of one kind put together."""
    assert make is not None
    reader = make()
    found: list[tuple[AnswerPart, str, int, str]] = []
    for piece in [*(piece for part in parts for piece in reader.feed(part)), *reader.end()]:
        last = found[-1] if found else None
        if last is not None and piece.part is last[0] is not AnswerPart.CALL and piece.call == last[2]:
            found[-1] = (piece.part, last[1] + piece.text, piece.call, "")
        else:
            found.append((piece.part, piece.text, piece.call, piece.id))
    return found


@pytest.mark.parametrize("name", WRITTEN)
@given(st.data())
def test_the_parts_in_which_an_answer_comes_change_nothing(name: str, data: st.DataObject):
    form = AnswerForm(tool_format(name, ""), THINK, {})
    before = data.draw(st.sampled_from(["", "<think>\nHm.</think>\n\n", "\n<think>Hm, {or} [<tool", "<thin ice"]))
    between = data.draw(st.sampled_from(["", "I look it up.\n\n", "[", "<tool_", "{"]))
    text = before + between + data.draw(st.sampled_from([WRITTEN[name], WRITTEN[name] + " and so on"]))
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    make = form.readers(MAY, None, thinking=False)
    assert events(make, parts) == events(make, [text])


@pytest.mark.parametrize("name", REASONING_NAMES)
@given(st.data())
def test_the_parts_in_which_thoughts_come_change_nothing(name: str, data: st.DataObject):
    tags = reasoning_tags(name, "")
    assert tags is not None
    marks = [tags.begin, tags.end, *filter(None, (tags.opening, *tags.asides, *(tags.around or ())))]
    pieces = st.sampled_from([*marks, *marks, "\n", "\n\n", "Hm.", " ", "<", tags.begin[:3]])
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    make = AnswerForm(tool_format("hermes", ""), tags, {}).readers(ToolUse(), None, thinking=data.draw(st.booleans()))
    assert events(make, parts) == events(make, [text])


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ALONE])
def test_a_call_that_repeats_an_earlier_one_is_dropped(name: str):
    form = AnswerForm(tool_format(name, ""), None, {})
    make = form.readers(MUST, None, thinking=False)
    assert make is not None
    again = WRITTEN[name].replace('a\\"b', "weather").replace('a"b', "weather")
    same = again.replace('Rome}\\"', "Paris").replace('Rome}"', "Paris").replace("Rome}", "Paris")
    for size in (1, 3, 1000):
        assert read(make, same, size) == ("", "", [("weather", PARIS)])
        assert read(make, again, size) == ("", "", [("weather", PARIS), ("weather", ROME)])


FENCES = ["{}", "```json\n{}\n```", "```\n{}\n```\n", "\n```tool_call\n{}\n```"]
AS_TEXT = '{"name": "weather", "arguments": {"place": "Paris"}}'


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "json"])
def test_an_answer_that_is_nothing_but_the_json_of_a_call(name: str, fence: str):
    if fence == "{}" and name == "llama3_json":
        return  # whose own calls are such JSON
    form = AnswerForm(tool_format(name, ""), THINK, {})
    grammar, make = form.grammar(MAY, None, thinking=False), form.readers(MAY, None, thinking=False)
    indented = json.dumps(json.loads(AS_TEXT), indent=2).replace('{\n    "place": "Paris"\n  }', PARIS)
    for written in (AS_TEXT, AS_TEXT.replace("arguments", "parameters"), indented):
        for before in ("", "<think>Hm.</think>\n\n"):
            text = before + fence.replace("{}", written)
            assert takes(grammar, text)
            assert not takes(grammar, text.replace('"Paris"', '["Paris", "Rome"]'))
            for size in (1, 2, 3, 7, 1000):
                assert read(make, text, size) == ("Hm." if before else "", "", [("weather", PARIS)])
    # What is no call reaches the client as it is, and so does one that is cut off before its arguments.
    inside = fence.replace("{}", AS_TEXT)
    for text in (
        f"I would write {inside}",
        inside.replace("weather", "whether"),
        inside.replace('"name"', '"names"'),
        fence.replace("{}", '{"name": "Bob", "arguments": []}') + " and so on",
        fence.replace("{}", "[1]"),
    ):
        assert takes(grammar, text)
        for size in (1, 3, 1000):
            assert read(make, text, size) == ("", text, [])
    for cut in (inside[: inside.index(place)] for place in ('"name"', "weather", ', "arg', 'guments"', '": {"p')):
        for size in (1, 3, 1000):
            assert read(make, cut, size) == ("", cut, [])
    off = AnswerForm(tool_format(name, ""), THINK, {}, calls_as_text=False)
    assert takes(off.grammar(MAY, None, thinking=False), inside.replace('"Paris"', '["Paris", "Rome"]'))
    assert read(off.readers(MAY, None, thinking=False), inside, 3) == ("", inside, [])


ROME_TEXT = '{"name": "a\\"b", "parameters": ROME}'.replace("ROME", ROME)
SEVERAL = [
    "[ONE, TWO]",
    "[\n  ONE,\n  TWO\n]\n",
    "```json\nONE\n```\n\n```json\nTWO\n```",
    "```json\n[\n  ONE,\n  TWO\n]\n```\n",
    "```\nONE\nTWO\n```",
    "```json\nONE,\nTWO\n```",
    "ONE\nTWO",
    "ONE\n\nTWO\n",
    "ONE; TWO",
]


@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize("name", ["hermes", "pythonic", "mistral", "tgi", "deepseek_v3", "json", "llama3_json"])
def test_an_answer_that_is_nothing_but_the_json_of_several_calls(name: str, several: str):
    if name in ("json", "llama3_json") and several.startswith("ONE"):
        return  # whose own calls are such JSON
    form = AnswerForm(tool_format(name, ""), THINK, {})
    grammar, make = form.grammar(MAY, None, thinking=False), form.readers(MAY, None, thinking=False)
    text = several.replace("ONE", AS_TEXT).replace("TWO", ROME_TEXT)
    calls = [("weather", '{"place": "Paris"}'), ('a"b', ROME)]
    for before in ("", "<think>Hm.</think>\n\n"):
        assert takes(grammar, before + text)
        for size in (1, 2, 3, 7, 1000):
            assert read(make, before + text, size) == ("Hm." if before else "", "", calls)
    for wrong in (
        text.replace("place", "plane", 1),
        text[::-1].replace("place"[::-1], "plane"[::-1], 1)[::-1],
        text.replace('a\\"b', "whether"),
        text + " Shall I go on?",
        text.rstrip("\n") + "\n" * 9,
    ):
        assert not takes(grammar, wrong)
    # A call that is made twice is not told again, and ends the answer.
    same = several.replace("ONE", AS_TEXT).replace("TWO", AS_TEXT)
    assert read(make, same, 3) == ("", "", calls[:1])
    # Only one may be called.
    once = ToolUse(TOOLS, parallel=False)
    assert not takes(form.grammar(once, None, thinking=False), text)
    # The second is cut off before its arguments.
    cut = text[: text.index("param")]
    for size in (1, 3, 1000):
        assert read(make, cut, size) == ("", "", calls[:1])


@pytest.mark.parametrize("several", ["ONE", "```json\nONE\n```", "[ONE, TWO]", "ONE\nTWO"])
def test_gpt_oss_writes_calls_as_text_in_its_last_channel(several: str):
    form = AnswerForm(tool_format("harmony", ""), reasoning_tags("harmony", ""), {})
    grammar, make = form.grammar(MAY, None, thinking=False), form.readers(MAY, None, thinking=False)
    text = several.replace("ONE", AS_TEXT).replace("TWO", ROME_TEXT)
    calls = [("weather", '{"place": "Paris"}'), ('a"b', ROME)][: 1 + ("TWO" in several)]
    final = "<|channel|>final<|message|>"
    for before in ("", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"):
        thought = "Hm." if before else ""
        assert takes(grammar, before + final + text)
        assert not takes(grammar, before + final + text.replace("place", "plane"))
        assert takes(grammar, before + final + "I would write " + text)
        for size in (1, 2, 7, 1000):
            assert read(make, before + final + text, size) == (thought, "", calls)
            assert read(make, before + final + "So: " + text, size) == (thought, "So: " + text, [])
            assert read(make, before + WRITTEN["harmony"], size) == (thought, "", [("weather", PARIS)])


def test_a_model_that_writes_calls_as_text_without_an_end():
    """It is ended after as many calls as an answer may have."""
    form = AnswerForm(tool_format("hermes", ""), None, {})
    parameters = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    use = ToolUse([tool("f", parameters)])
    one = '{"name": "f", "arguments": {"n": true}}'
    grammar = form.grammar(use, None, thinking=False)
    assert takes(grammar, "\n".join([one] * 32))
    assert not takes(grammar, "\n".join([one] * 33))
    assert not takes(grammar, f"[{', '.join([one] * 33)}]")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("fence", ["", "```json\n"])
@pytest.mark.parametrize("blank", ["", " "])
def test_calls_with_the_doubled_braces_of_some_templates_are_not_written(name: str, fence: str, blank: str):
    doubled = f'{{{{{blank}"name": "weather", "arguments": {{"place": "Paris"}}{blank}}}}}'
    form = AnswerForm(tool_format(name, ""), THINK, {})
    assert not takes(form.grammar(MAY, None, thinking=False), fence + doubled)
    assert takes(form.grammar(MAY, None, thinking=False), "Write " + doubled)
    off = AnswerForm(tool_format(name, ""), THINK, {}, calls_as_text=False)
    assert takes(off.grammar(MAY, None, thinking=False), fence + doubled)


def test_calls_have_the_ids_that_the_model_gives_them():
    form = AnswerForm(tool_format("kimi_k2", ""), None, {})
    found = events(form.readers(MUST, None, thinking=False), [WRITTEN["kimi_k2"]])
    assert [each[3] for each in found if each[0] is AnswerPart.CALL] == ["functions.weather:0", 'functions.a"b:12']


@pytest.mark.parametrize("name", WRITTEN)
@given(st.text(st.sampled_from('<tol_ca>{"name: [TOOLCALLS]é\n'), max_size=20), st.integers(1, 9))
def test_a_text_without_calls_stays_as_it_is(name: str, text: str, size: int):
    form = tool_format(name, "")
    if not form.anywhere or form.trigger not in text:
        assert read(AnswerForm(form, None, {}).readers(MAY, None, thinking=False), text, size) == ("", text, [])


def test_a_call_that_is_cut_off_gives_what_there_is():
    form = AnswerForm(tool_format("hermes", ""), None, {})
    cut = WRITTEN["hermes"][:50]
    assert read(form.readers(MUST, None, thinking=False), cut, 3) == ("", "", [("weather", '{"pla')])
    assert read(form.readers(MUST, None, thinking=False), cut[:20], 3) == ("", "", [])
    form = AnswerForm(tool_format("json", ""), None, {})
    assert read(form.readers(MAY, None, thinking=False), WRITTEN["json"][:25], 3) == ("", "", [])


def test_special_tokens_of_a_form_are_tokens_in_its_grammar():
    marks = {2: "[TOOL_CALLS]", 3: "[ARGS]"}
    form = AnswerForm(tool_format("mistral_args", ""), None, marks)
    assert form.shown == {2, 3}
    grammar = form.grammar(MAY, None, thinking=False)
    assert takes(grammar, "Well.", 2, "weather", 3, PARIS, 2, 'a"b', 3, ROME)
    assert not takes(grammar, 2, "weather", 3, '{"place": 3}')
    assert takes(grammar, "[TOOL_CALLS] is a word here")


def test_an_answer_with_a_form_of_its_own_beside_tools():
    answer = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}))
    for name in ("hermes", "qwen3_coder", "llama3_json", "tgi"):
        form = AnswerForm(tool_format(name, ""), None, {})
        grammar = form.grammar(MAY, answer, thinking=False)
        assert takes(grammar, "true")
        assert takes(grammar, WRITTEN[name])
        assert not takes(grammar, "Sunny, I think.")
        assert read(form.readers(MAY, answer, thinking=False), "true", 2) == ("", "true", [])
    for name in BRACES:
        form = AnswerForm(tool_format(name, ""), None, {})
        properties = {"type": {}, "name": {"type": "string"}, "n": {"const": 1}, "function": {}}
        like_a_call = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": properties}))
        grammar, make = (each(MAY, like_a_call, thinking=False) for each in (form.grammar, form.readers))
        assert takes(grammar, WRITTEN[name])
        assert not takes(grammar, WRITTEN[name].replace("place", "plane"))
        for text in ('{"n": 1}', '{"name": "Bob"}', '{"function": {"_name": "Bob"}}', '{"type": "function", "n": 1}'):
            assert takes(grammar, text)
            assert read(make, text, 3) == ("", text, [])
    with pytest.raises(InvalidTool, match="only be JSON"):
        form.grammar(MAY, Grammar(GrammarKind.REGEX, "a"), thinking=False)


def test_thoughts_come_before_calls_and_before_json():
    answer = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "boolean"}')
    form = AnswerForm(tool_format("hermes", ""), THINK, {})
    for use, asked, text in ((MUST, None, WRITTEN["hermes"]), (ToolUse(), answer, "true"), (MAY, None, "Sunny.")):
        for thinking in (True, False):
            grammar = form.grammar(use, asked, thinking=thinking)
            thought = ("" if thinking else "<think>\n") + "Hm, <tool_call> or { is\ngood.</think>\n\n"
            assert takes(grammar, thought + text)
            assert thinking or takes(grammar, text)
            told = read(form.readers(use, asked, thinking=thinking), thought + text, 3)
            calls = written_calls("hermes") if use is MUST else []
            assert told == ("Hm, <tool_call> or { is\ngood.", "" if calls else text, calls)
    assert not takes(form.grammar(MUST, None, thinking=True), WRITTEN["hermes"])
    assert form.grammar(ToolUse(), None, thinking=True) is None
    regex = Grammar(GrammarKind.REGEX, "a")
    assert form.grammar(ToolUse(), regex, thinking=True) is regex
    assert form.readers(ToolUse(), regex, thinking=True) is None
    assert read(form.readers(ToolUse(), None, thinking=True), "only thoughts", 4) == ("only thoughts", "", [])


def test_marks_around_the_answer_behind_thoughts():
    form = AnswerForm(tool_format("granite", ""), reasoning_tags("granite33", ""), {})
    thought = "<think>Hm.</think>\n"
    answer = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "boolean"}')
    for use, asked, text, told in (
        (ToolUse(), answer, "true", ("Hm.", "true", [])),
        (MUST, None, WRITTEN["granite"], ("Hm.", "", written_calls("granite"))),
        (MAY, None, "It </response> rains.", ("Hm.", "It </response> rains.", [])),
    ):
        for said in (text, f"<response>\n{text}\n</response>", f"\n<response>{text}</response>"):
            assert takes(form.grammar(use, asked, thinking=False), thought + said)
            for size in (1, 2, 3, 7, 1000):
                assert read(form.readers(use, asked, thinking=False), thought + said, size) == told
    without = "<response>It rains.</response>"
    assert read(form.readers(ToolUse(), None, thinking=False), without, 3) == ("", without, [])


@pytest.mark.parametrize("name", ["deepseek_v32", "granite", "olmo3"])
def test_marks_within_text_that_are_special_tokens(name: str):
    """Behind other characters of a mark, and beside thoughts whose marks are text."""
    special = {"deepseek_v32": "\uff5cDSML\uff5c", "granite": "<|tool_call|>", "olmo3": "<function_calls>"}[name]
    form = AnswerForm(tool_format(name, ""), THINK, {2: special})
    parts = [part for text in WRITTEN[name].split(special) for part in (text, 2)][:-1]
    thought = "<think>Hm.</think>\n"
    for before in ("", "Well. ", thought, f"{thought}Well. "):
        assert takes(form.grammar(MAY, None, thinking=False), before, *parts)
        assert not takes(form.grammar(MAY, None, thinking=False), before, *parts[:-1])
        assert takes(form.grammar(MAY, None, thinking=False), before + "It rains.")
    assert not takes(form.grammar(MAY, None, thinking=False), 2, "whether")


def test_messages_of_harmony_follow_each_other():
    thought, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    form = AnswerForm(tool_format("harmony", ""), reasoning_tags("harmony", ""), {})
    said = f"{thought}Hm.{end}{thought} Well.{end}<|channel|>commentary<|message|>I look.{end}{thought} So.{end}"
    for last, told in (
        ("<|channel|>final<|message|>It rains.", " It rains."),
        ("<|channel|>fin", ""),
        (" It <|", " It <|"),
    ):
        text = said + last.replace("It rains", " It rains")
        for size in (1, 2, 3, 7, 1000):
            assert read(form.readers(ToolUse(), None, thinking=False), text, size) == (
                "Hm. Well. So.",
                f"I look.{told}",
                [],
            )
    answer = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "boolean"}')
    grammar = form.grammar(ToolUse(), answer, thinking=False)
    assert takes(grammar, f"{thought}Hm.{end}<|channel|>final<|message|>true")
    assert not takes(grammar, f"{thought}Hm.{end}\n<|channel|>final<|message|>true")


TEMPLATES = {
    "hermes": """{% if tools %}<tool_call>\\n{"name": <function-name>}{% endif %}""",
    "qwen3_coder": """{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>\\n' }}""",
    "glm45": """<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>""",
    "minimax_m2": """{{ '<minimax:tool_call>' }}<invoke name="tool-name-1">""",
    "glm47": """<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>""",
    "seed_oss": """{{ '<seed:tool_call>\\n<function=' + name + '>' }}<parameter=example_parameter_1>""",
    "gemma4": """{{ '<|tool_call>call:' + name + '{' }}""",
    "kimi_k2": """<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>{{ arguments }}""",
    "olmo3": """{{ '<function_calls>' + name + '(' + arguments + ')</function_calls>' }}""",
    "deepseek_v32": """{% set dsml = '\uff5cDSML\uff5c' %}{{ '<' + dsml + 'function_calls>' }}""",
    "deepseek_v4": """{% set dsml = '\uff5cDSML\uff5c' %}{{ '<' + dsml + 'tool_calls>' }}""",
    "phi4_mini": """{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}""",
    "functools": """{{ '<|tool|>' }}formatted as functools[{"name": [function name]}, ...]""",
    "granite": """respond with <|tool_call|> followed by a JSON list of tools used: {"name": "f", "arguments": {}}""",
    "lfm2": """{{ "List of tools: <|tool_list_start|>" }}""",
    "pythonic": """in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]""",
    "mistral": """{{ "[TOOL_CALLS] [" }}{{ tools }}""",
    "mistral_args": """{{ "[TOOL_CALLS]" + name + "[ARGS]" }}""",
    "llama3_json": """{% if tools is not none %}{{ '{"name": "' + name + '", ' }}{{ '"parameters": ' }}{% endif %}""",
    "deepseek_v3": f"{{{{ '{OPEN}' + type + '{SEP}' + name + '\\\\n```json' }}}}",
    "deepseek_v31": f"{{{{ '{OPEN}' + name + '{SEP}' }}}}",
    "functionary": """{{ '<function=' + name + '>' }}""",
    "json": """{% for tool in tools %}{% endfor %}{{ '{"name": "' + name + '", "arguments": ' }}""",
    "tgi": """{{ messages }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_form_is_told_by_the_template(name: str):
    assert tool_format("auto", TEMPLATES[name]).name == name
    assert tool_format("functionary", TEMPLATES[name]).name == "functionary"


def test_thoughts_are_told_by_the_template():
    assert reasoning_tags("auto", "{{ '</think>' }}") == THINK
    assert reasoning_tags("auto", "{{ messages }}") is None
    assert reasoning_tags("none", "</think>") is None
    assert THINK is not None
    assert THINK.open_in("<assistant><think>\n")
    assert not THINK.open_in("<think>\n\n</think>\n\n")


def use_of(tools: list[ToolSpec], choice: Any = None, **fields: Any) -> ToolUse:
    """Returns what a chat with these tools and this choice may call."""
    sent = [{"type": "function", "function": {"name": each.name, "parameters": each.parameters}} for each in tools]
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": sent, "tool_choice": choice, **fields}
    return tools_of(ChatRequest.model_validate(body))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_that_may_call_no_tool(name: str):
    form = AnswerForm(tool_format(name, ""), THINK, {})
    for thinking in (False, True):
        grammar = form.without_calls(ToolUse(declared=TOOLS), thinking=thinking)
        before = "Hm.</think>\n\n" if thinking else ""
        assert takes(grammar, before + "Sunny, I think.")
        assert not takes(grammar, before + WRITTEN[name])
    assert form.without_calls(ToolUse(), thinking=False) is None


def test_the_choice():
    weather, clock = TOOLS[0], TOOLS[2]
    tools = [weather, clock]
    assert use_of(tools) == ToolUse(tools)
    assert use_of(tools, "auto", parallel_tool_calls=False) == ToolUse(tools, parallel=False)
    assert use_of(tools, "none") == ToolUse()
    assert use_of(tools, "required") == ToolUse(tools, required=True)
    for named in ({"type": "function", "function": {"name": "clock"}}, {"function": {"name": "clock"}}, "clock"):
        assert use_of(tools, named) == ToolUse([clock], required=True, parallel=False)
    for mode in ("auto", "required"):
        some = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
        chosen = use_of(tools, {"type": "allowed_tools", "allowed_tools": some})
        assert chosen == ToolUse([weather], required=mode == "required")
    assert use_of([]) == ToolUse()


@pytest.mark.parametrize(
    ("tools", "chosen", "fault"),
    [
        ([TOOLS[2]], {"function": {"name": "radio"}}, "radio"),
        ([TOOLS[2], TOOLS[2]], "auto", "same name"),
        ([], "required", "no `tools`"),
    ],
)
def test_choices_that_make_no_sense(tools: list[ToolSpec], chosen: Any, fault: str):
    with pytest.raises(InvalidTool, match=fault):
        use_of(tools, chosen)


def test_references_within_the_parameters_hold():
    parameters = {
        "type": "object",
        "properties": {"stop": {"$ref": "#/$defs/place"}, "tree": {"$ref": "#"}},
        "required": ["stop"],
        "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    }
    form = AnswerForm(tool_format("functionary", ""), None, {})
    grammar = form.grammar(ToolUse([tool("a/b~c", parameters)], required=True), None, thinking=False)
    assert takes(grammar, '<function=a/b~c>{"stop": {"city": "Rome"}, "tree": {"stop": {"city": "Rome"}}}</function>')
    assert not takes(grammar, '<function=a/b~c>{"stop": {"town": "Rome"}}</function>')


def test_references_are_no_references_where_no_schema_stands():
    data = {"$ref": "#", "$defs": {"$ref": "#/a"}}
    written = json.dumps(data)
    place = {"$ref": "#/$defs/place"}
    parameters = {
        "type": "object",
        "properties": {
            "told": {"const": data},
            "one": {"enum": [data]},
            # Names of members, though keywords are called so.
            "const": place,
            "enum": {"type": "object", "properties": {"$ref": place, "default": place}, "additionalProperties": False},
        },
        "$defs": {"place": {"enum": ["Rome"], "default": data, "examples": [data]}},
        "additionalProperties": False,
    }
    form = AnswerForm(tool_format("functionary", ""), None, {})
    grammar = form.grammar(ToolUse([tool("f", parameters)], required=True), None, thinking=False)
    for arguments in (
        f'{{"told": {written}}}',
        f'{{"one": {written}}}',
        '{"const": "Rome"}',
        '{"enum": {"$ref": "Rome", "default": "Rome"}}',
    ):
        assert takes(grammar, f"<function=f>{arguments}</function>"), arguments
    for arguments in ('{"const": "Oslo"}', '{"enum": {"$ref": "Oslo"}}', '{"enum": {"default": "Oslo"}}'):
        assert not takes(grammar, f"<function=f>{arguments}</function>"), arguments


def test_arguments_that_are_taken_from_the_conversation():
    parameters = {"type": "object", "properties": {"place": {"type": "string", "x-span": True}}, "required": ["place"]}
    form = AnswerForm(tool_format("functionary", ""), None, {})
    grammar = form.grammar(ToolUse([tool("weather", parameters)], required=True), None, thinking=False)
    assert grammar is not None
    grammar = Grammar(grammar.type, grammar.value, "What of Oslo?", grammar.frame)
    assert takes(grammar, '<function=weather>{"place": "Oslo"}</function>')
    assert not takes(grammar, '<function=weather>{"place": "Rome"}</function>')


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "say", "arguments": {"input": TEXT}}\n</tool_call>'),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.say:0<|tool_call_argument_begin|>"
            '{"input": TEXT}<|tool_call_end|><|tool_calls_section_end|>',
        ),
        ("pythonic", "[say(input=TEXT)]"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=say>\n<parameter=input>\nTEXT\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm45", "<tool_call>say\n<arg_key>input</arg_key>\n<arg_value>TEXT</arg_value>\n</tool_call>"),
        ("gemma4", "<|tool_call>call:say{input:TEXT}<tool_call|>"),
    ],
)
def test_a_text_with_a_grammar_is_written_as_json(name: str, call: str):
    lark = 'start: "say " (/[a-z]+/ | ESCAPED_STRING) "\\n"\n%import common.ESCAPED_STRING'
    form = AnswerForm(tool_format(name, ""), None, {})
    use = ToolUse([free_form_tool("say", None, "lark", lark)], required=True)
    grammar = form.grammar(use, None, thinking=False)
    for text, valid in (("say yes\n", True), ('say "a\\"\\\\"\n', True), ("say yes", False), ('say "\n', False)):
        written = call.replace("TEXT", json.dumps(text))
        assert takes(grammar, written) is valid, written
        make = form.readers(use, None, thinking=False)
        assert make is not None
        reader = make()
        pieces = [*reader.feed(written), *reader.end()]
        arguments = "".join(piece.text for piece in pieces if piece.part is AnswerPart.ARGUMENTS)
        assert free_form_input(arguments) == text


@pytest.mark.parametrize(
    "parameters", [3, [], {"type": "array", "items": {"type": "string"}}, {"type": ["string", "null"]}, {"type": None}]
)
def test_parameters_must_be_a_schema_of_an_object(parameters: Any):
    form = AnswerForm(tool_format("tgi", ""), None, {})
    with pytest.raises(InvalidTool, match="'clock' must be a JSON schema of an object"):
        form.grammar(ToolUse([tool("clock", parameters)], required=True), None, thinking=False)


@pytest.mark.parametrize("kind", [{}, {"type": "object"}, {"type": ["object", "null"]}], ids=str)
def test_arguments_are_an_object(kind: dict[str, Any]):
    parameters = {**kind, "properties": {"place": {"type": "string"}}}
    form = AnswerForm(tool_format("functionary", ""), None, {})
    grammar = form.grammar(ToolUse([tool("weather", parameters)], required=True), None, thinking=False)
    assert takes(grammar, f"<function=weather>{PARIS}</function>")
    assert not takes(grammar, "<function=weather>null</function>")


@pytest.mark.parametrize("form", [tool_format(name, "") for name in FORMAT_NAMES], ids=lambda form: form.name)
def test_long_arguments_take_no_longer_than_others(form: ToolFormat):
    """A search that begins anew at each of these characters would take minutes."""
    tail = "}" + "\\\\ " * 100_000
    make = AnswerForm(form, None, {}).readers(MUST, None, thinking=False)
    assert make is not None
    reader = make()
    reader.feed(form.trigger + form.first_head("weather").replace(NUMBER, "0"))
    begin, end = '{"place": "', '"}'
    if form.tags is not None:
        quote = form.tags.quote if form.tags.end else '"'
        begin, end = form.tags.tag("place", text=True) + quote, form.tags.end or '"'
    pieces = [piece for part in (begin, tail, tail, end) for piece in reader.feed(part)]
    arguments = "".join(piece.text for piece in pieces if piece.part is AnswerPart.ARGUMENTS)
    read_back = arguments if form.as_json is None else json.loads(arguments + "}")["place"]
    escaped = form.tags is not None and not form.tags.end
    assert len(read_back) == 2 * (len(json.loads(f'"{tail}"')) if escaped else len(tail)) + (0 if form.as_json else 13)


TAGGED = [tool_format(name, "") for name in FORMAT_NAMES if tool_format(name, "").tags]
in_tags = pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
SEARCH = tool(
    "search",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "as it is"},
            "order": {"$ref": "#/$defs/Order"},
            "site": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "pages": {"type": "array", "items": {"type": "integer"}},
            "since": {"type": "string", "format": "date"},
        },
        "required": ["text", "pages"],
        "$defs": {"Order": {"enum": ["best", "newest"], "type": "string"}},
    },
)


def tagged_call(form: ToolFormat, name: str, *parameters: tuple[str, str]) -> str:
    assert form.tags is not None
    told = form.tags.separator.join(tagged_argument(form.tags, key, value) for key, value in parameters)
    return form.trigger + form.first_head(name) + told + form.tail + form.end


def tagged_argument(tags: ArgumentTags, name: str, value: str) -> str:
    """Returns an argument of `SEARCH`, or of `weather`, as models write it. value: a text as it is, or JSON."""
    text = name in ("text", "order", "site", "place", "with") and not (name == "site" and value == "null")
    tag = tags.tag(name, text=text)
    if not tags.separator:
        return tag + value + tags.end
    if not text:
        return tag + value
    return tag + (tags.quote + value + tags.end if tags.end else json.dumps(value, ensure_ascii=False))


def json_call(form: ToolFormat, name: str, arguments: str, *, first: bool) -> str:
    """Returns a call whose arguments are JSON, up to its end."""
    assert form.as_json is not None
    head = (
        form.trigger + form.as_json.first_head(name) if first else form.as_json.separator + form.as_json.call_head(name)
    )
    return head + arguments + form.as_json.tail


@in_tags
@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ([("text", 'a "b"\n</param\n'), ("pages", "[1, 2]")], {"text": 'a "b"\n</param\n', "pages": [1, 2]}),
        ([("text", ""), ("site", "null"), ("pages", "[]")], {"text": "", "site": None, "pages": []}),
        ([("text", "12"), ("site", "nullity"), ("pages", "[]")], {"text": "12", "site": "nullity", "pages": []}),
        ([("text", "é"), ("order", "best"), ("pages", "[3]")], {"text": "é", "order": "best", "pages": [3]}),
        (
            [("text", "t"), ("pages", "[]"), ("since", '"2024-02-29"')],
            {"text": "t", "pages": [], "since": "2024-02-29"},
        ),
    ],
)
def test_tagged_arguments_are_read_as_json(
    parameters: list[tuple[str, str]], arguments: dict[str, Any], form: ToolFormat
):
    use, answers = ToolUse([SEARCH], required=True), AnswerForm(form, None, {})
    text = tagged_call(form, "search", *parameters)
    assert takes(answers.grammar(use, None, thinking=False), text)
    for size in (1, 2, 3, 7, 1000):
        _, _, [(name, told)] = read(answers.readers(use, None, thinking=False), text, size)
        assert (name, json.loads(told)) == ("search", arguments)
        assert told == json.dumps(arguments, ensure_ascii=False)


@in_tags
@pytest.mark.parametrize(
    "parameters",
    [
        [("text", "without pages")],
        [("pages", "[1]"), ("text", "out of order")],
        [("text", "t"), ("order", "worst"), ("pages", "[1]")],
        [("text", "t"), ("pages", '["1"]')],
        [("text", "t"), ("pages", "[1]"), ("since", "2024-02-29")],
        [("text", "t"), ("pages", "[1]"), ("since", '"2023-02-29"')],
    ],
)
def test_tagged_arguments_are_bound(parameters: list[tuple[str, str]], form: ToolFormat):
    grammar = AnswerForm(form, None, {}).grammar(ToolUse([SEARCH], required=True), None, thinking=False)
    assert not takes(grammar, tagged_call(form, "search", *parameters))


@in_tags
@pytest.mark.parametrize(
    "parameters",
    [
        {**WEATHER, "anyOf": [{"required": ["place"]}]},
        {**WEATHER, "minProperties": 1},
        {"type": "object", "properties": {"a place": {"type": "string"}}, "required": ["a place"]},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "required": ["place"]},
    ],
)
def test_arguments_that_fit_no_tags_are_json(parameters: Any, form: ToolFormat):
    answers = AnswerForm(form, None, {})
    use = ToolUse([tool("weather", parameters), TOOLS[2]], required=True)
    arguments = json.dumps({next(iter(parameters.get("properties", {"place": 0}))): "Paris"})
    text = json_call(form, "weather", arguments, first=True) + form.separator + form.call_head("clock") + form.tail
    text += json_call(form, "weather", arguments, first=False) + form.end
    assert takes(answers.grammar(use, None, thinking=False), text)
    assert not takes(answers.grammar(use, None, thinking=False), text.replace('"Paris"', "[1"))
    for size in (1, 3, 1000):
        calls = [("weather", arguments), ("clock", "{}")]  # the third repeats the first
        assert read(answers.readers(use, None, thinking=False), text, size) == ("", "", calls)


SEARCHED = tool(
    "search",
    {
        "type": "object",
        "properties": {
            "with": {"type": "string"},
            "exact": {"type": "boolean"},
            "pages": {"type": "integer"},
            "near": {"type": "object", "properties": {"km": {"type": "number"}}, "required": ["km"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["pages"],
    },
)


@in_tags
def test_values_of_every_kind(form: ToolFormat):
    assert form.tags is not None
    answers, use = AnswerForm(form, None, {}), ToolUse([SEARCHED, tool("search_all")], required=True)
    grammar = answers.grammar(use, None, thinking=False)
    true = form.tags.words.get("true", "true")
    whole = [("with", "a, b}) or <"), ("exact", true), ("pages", "-12"), ("near", '{"km": 1.5}')]
    marks = ["</arg_value>", """),]}'\\\""""]
    whole.append(("tags", json.dumps(marks)))
    read_back = {"with": "a, b}) or <", "exact": True, "pages": -12, "near": {"km": 1.5}, "tags": marks}
    for left_out in ((), ("with",), ("tags",), ("exact", "near"), ("with", "exact", "near", "tags")):
        text = tagged_call(form, "search", *(each for each in whole if each[0] not in left_out))
        assert takes(grammar, text)
        expected = json.dumps({key: value for key, value in read_back.items() if key not in left_out})
        for size in (1, 2, 3, 7, 1000):
            told = read(answers.readers(use, None, thinking=False), text, size)
            assert told == ("", "", [("search", expected)])
    for wrong in (
        tagged_call(form, "search", ("exact", true)),
        tagged_call(form, "search", ("exact", '"yes"'), ("pages", "1")),
        tagged_call(form, "search", ("pages", "1.5")),
        tagged_call(form, "search", ("pages", "1"), ("near", "{}")),
        tagged_call(form, "search", ("pages", "1"), ("exact", true)),
    ):
        assert not takes(grammar, wrong)
    for size in (1, 2, 1000):  # a name may begin another one
        told = read(answers.readers(use, None, thinking=False), tagged_call(form, "search_all"), size)
        assert told == ("", "", [("search_all", "{}")])


IN_TAGS = [form for form in TAGGED if form.tags and not form.tags.separator]
TWO_TEXTS = {"type": "object", "properties": {"place": {"type": "string"}, "n": {"type": "integer"}}}


@pytest.mark.parametrize("form", IN_TAGS, ids=lambda form: form.name)
@pytest.mark.parametrize("value", ["a", "", 'say "hi"', "<b>\n</b>", "</p", "<parameter=n>", "a\n\nb", " a "])
def test_tags_stand_on_lines_of_their_own_or_not(form: ToolFormat, value: str):
    """Models leave line breaks out where the template has them, and write some where it has none."""
    assert form.tags is not None
    use = ToolUse([tool("write", {**TWO_TEXTS, "required": ["place"]})], required=True)
    answers = AnswerForm(form, None, {})
    text = tagged_call(form, "write", ("place", value), ("n", "3"))
    text = text.replace(form.tags.tag("place", text=True) + value + form.tags.end, "VALUE")
    opened = [form.tags.tag("place", text=True)]
    opened += [opened[0].rstrip("\n")] if form.tags.in_lines else []
    closed = ["\n" + form.tags.closing, form.tags.closing] if form.tags.in_lines else [form.tags.closing]
    for begin in opened:
        for end in closed:
            for layout in (text, text.replace("\n", ""), text.replace("\n", "\n\n").replace("VALUE", "VALUE\n  ")):
                written = layout.replace("VALUE", begin + value + end)
                assert takes(answers.grammar(use, None, thinking=False), written)
                for size in (1, 2, 3, 7, 1000):
                    _, told, [(name, arguments)] = read(answers.readers(use, None, thinking=False), written, size)
                    assert (told, name, json.loads(arguments)) == ("", "write", {"place": value, "n": 3})
    if form.tags.in_lines:  # an empty value has one line break or two
        written = text.replace("VALUE", opened[0] + form.tags.closing)
        _, _, [(_, arguments)] = read(answers.readers(use, None, thinking=False), written, 2)
        assert json.loads(arguments) == {"place": "", "n": 3}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_model_that_prefers_line_breaks_and_then_the_end(name: str, parallel: bool):
    """At each place it writes the first of these that the grammar lets it write."""
    form = AnswerForm(tool_format(name, ""), None, {})
    parameters = {"type": "object", "properties": {"place": {"enum": ["Paris"]}}, "required": ["place"]}
    use = ToolUse([tool("weather", parameters)], required=True, parallel=parallel)
    written = preferring(form.grammar(use, None, thinking=False), ["\n", None, "s", "}", '"', ")", "]", "<", "P"])
    assert written is not None
    _, told, calls = read(form.readers(use, None, thinking=False), written, 3)
    assert (told, [called for called, _ in calls]) == ("", ["weather"])
    assert json.loads(calls[0][1]) == {"place": "Paris"}


@in_tags
def test_what_is_lenient_of_tagged_arguments_is_left_to_the_model(form: ToolFormat):
    parameters = {
        "type": "object",
        "properties": {"tags": {"$ref": "#/$defs/tags"}},
        "$defs": {"tags": {"type": "string", "pattern": "(?=a)b"}},
    }
    for strict in (True, False):
        grammar = AnswerForm(form, None, {}).grammar(
            ToolUse([tool("tag", parameters, strict=strict)]), None, thinking=False
        )
        assert grammar is not None
        assert ("pattern" in (compiler_fault(grammar) or "")) is strict


@in_tags
def test_a_tagged_call_that_is_cut_off_gives_what_there_is(form: ToolFormat):
    text = tagged_call(form, "search", ("text", "How long"))
    behind = form.tags.end.rstrip("\n") if form.tags else ""
    cut = text[: text.index("How long") + len("How long" + behind[:-1])]
    told = read(AnswerForm(form, None, {}).readers(ToolUse([SEARCH]), None, thinking=False), cut, 3)
    assert told == ("", "", [("search", '{"text": "How long')])


def test_marks_of_arguments_may_be_special_tokens():
    marks = {2: "<arg_value>", 3: "</arg_value>"}
    form = AnswerForm(tool_format("glm45", ""), None, marks)
    assert form.shown == {2, 3}
    grammar = form.grammar(ToolUse(TOOLS[:1], required=True), None, thinking=False)
    head = "<tool_call>weather\n<arg_key>place</arg_key>\n"
    assert takes(grammar, head, 2, "Paris </arg_value>", 3, "\n</tool_call>")
    assert not takes(grammar, head, 2, "Paris </arg_value>\n</tool_call>")
