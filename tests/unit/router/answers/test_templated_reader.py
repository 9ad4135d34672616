"""Answers that are parsed with a model's `response_template`, as `transformers` does it, and within bounds."""

import json
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from tests.grammars import takes
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.router.answers.formats import TGI_FORMAT
from tgi_server.router.answers.reader import AnswerPart, AnswerReader, Piece
from tgi_server.router.answers.response_template import ANSWER_SECONDS, ResponseTemplate, SearchBudget
from tgi_server.router.answers.templated_reader import TemplatedReader
from tgi_server.router.answers.tools import AnswerForm, ToolSpec, ToolUse

SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": ["boolean", "null"]}},
}
TOOLS = {"weather": SCHEMA, "clock": None}
THOUGHTS: Any = {"open": "[[", "close": "]]"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "json": {
        "start_anchor": "<answer>",
        "fields": {
            "reasoning_content": THOUGHTS,
            "tool_calls": {
                "open_pattern": r"\s*<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": ["<end>", "<end of all>"]},
        },
    },
    "list": {
        "start_anchor_pattern": "<answer(?: [a-z]+)?>",
        "fields": {
            "thinking": THOUGHTS,
            "tool_calls": {
                "open": "<calls>",
                "close": "</calls>",
                "content": "json",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{parameters.all}"}},
            },
            "content": {"repeats": True, "join": "\n"},
        },
    },
    "tags": {
        "start_anchor": "<answer>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<p=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</p>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content_args": {"strip": False}},
        },
    },
    "marks": {
        "start_anchor": "<answer>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    },
    "lines": {
        "start_anchor": "<answer>",
        "fields": {
            "tool_calls": {
                "open_pattern": "CALL (?P<name>[a-z]+)\n",
                "close": "\n\n",
                "repeats": True,
                "content": "kv-lines",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    },
}
ARGUMENTS = {"place": "Paris", "days": 3, "wind": True}
CALLS = {
    "json": f"\n<call>{json.dumps({'name': 'weather', 'arguments': ARGUMENTS})}</call>\n"
    '<call>{"name": "clock", "arguments": {}}</call>',
    "list": f'<calls>[{{"name": "weather", "parameters": {{"all": {json.dumps(ARGUMENTS)}}}}},'
    ' {"name": "clock", "parameters": {"all": {}}}]</calls>',
    "tags": "<function=weather>\n<p=place>\nParis\n</p><p=days>3</p>\n<p=wind>true</p></function>\n"
    "<function=clock></function>",
    "marks": '<|tool_call>call:weather{place:<|"|>Paris<|"|>,days:3,wind:true}<tool_call|>'
    "<|tool_call>call:clock{}<tool_call|>",
    "lines": "CALL weather\nplace: Paris\ndays: 3\nwind: true\n\nCALL clock\n\n\n",
}


def read(name: str, parts: list[str], prompt: str = "", spec: Any = None) -> list[tuple[AnswerPart, str, int]]:
    """Returns the pieces of an answer that comes in these parts, with neighbours of one kind put together."""
    template = ResponseTemplate.read(spec or TEMPLATES[name])
    reader = AnswerReader(TemplatedReader(template, TOOLS, template.begun(prompt)))
    found: list[tuple[AnswerPart, str, int]] = []
    pieces: list[Piece] = [piece for part in parts for piece in reader.feed(part)] + reader.end()
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and piece.part is last[0] and piece.part in (AnswerPart.TEXT, AnswerPart.THOUGHT):
            found[-1] = (piece.part, last[1] + piece.text, piece.call)
        else:
            found.append((piece.part, piece.text, piece.call))
    return found


def parts_of(pieces: list[tuple[AnswerPart, str, int]], part: AnswerPart) -> list[str]:
    return [text for kind, text, _ in pieces if kind is part]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("before", ["", "[[Hm, <call> or\n so. ]]  ", "\n"])
@pytest.mark.parametrize("text", ["", "  It rains; [I] think.\n "])
def test_answers_are_read_as_transformers_reads_them(name: str, before: str, text: str):
    before = before if "[[" in str(TEMPLATES[name]) else ""
    said = before + text + CALLS[name]
    tools = [{"function": {"name": each, "parameters": schema}} for each, schema in TOOLS.items()]
    prompt = "<answer>earlier<answer>"
    expected = parse_response(said, TEMPLATES[name], prefix=prompt, tools=tools)
    found = read(name, list(said), prompt)
    thoughts = expected.get("reasoning_content") or expected.get("thinking") or ""
    content = expected.get("content") or ""
    assert "".join(parts_of(found, AnswerPart.THOUGHT)) == thoughts
    assert "".join(parts_of(found, AnswerPart.TEXT)) == ("\n".join(content) if isinstance(content, list) else content)
    called = [(each["function"]["name"], each["function"].get("arguments", {})) for each in expected["tool_calls"]]
    names, arguments = parts_of(found, AnswerPart.CALL), parts_of(found, AnswerPart.ARGUMENTS)
    assert list(zip(names, map(json.loads, arguments), strict=True)) == called
    assert called == [("weather", ARGUMENTS), ("clock", {})]


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.data())
def test_the_parts_in_which_an_answer_comes_change_nothing(name: str, data: st.DataObject):
    pieces = st.sampled_from(
        [CALLS[name], "[[Hm.]]", " ", "\n", "It rains", "<", "[", "<call>{}</call>", "<end>", "CALL "]
    )
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    assert read(name, [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]) == read(name, [text])


def test_thoughts_that_begin_in_the_prompt():
    found = read("json", ["Hm.", "]]", "Rain."], "<answer>[[old]] text<answer>[[\n")
    assert found == [(AnswerPart.THOUGHT, "Hm.", 0), (AnswerPart.TEXT, "Rain.", 0)]


def test_a_call_whose_last_mark_is_left_out():
    text = '<call>{"name": "clock", "arguments": {}}'
    assert parts_of(read("json", [text]), AnswerPart.CALL) == ["clock"]


def test_what_calls_no_tool_is_text():
    for call in ("<call>not JSON</call>", '<call>{"name": "radio", "arguments": {}}</call>', '<call>{"name": "weath'):
        assert read("json", ["Well. ", *call]) == [(AnswerPart.TEXT, f"Well. {call}", 0)]


def test_slow_expressions_are_given_up():
    spec = {
        "start_anchor": "<answer>",
        "fields": {"content": {}, "thinking": {"open_pattern": "(a|aa|a?)+b!", "close": "c"}},
    }
    started = monotonic()
    text = "a" * 300
    assert read("", [text, text, " and on"], spec=spec) == [(AnswerPart.TEXT, f"{text}{text} and on", 0)]
    assert monotonic() - started < 20 * ANSWER_SECONDS


def test_long_answers_are_not_given_up():
    """Each search takes some microseconds, of which a long answer has many."""
    spent = SearchBudget(0.001)
    pattern = regex.compile("<call>")
    for _ in range(1_000):
        assert spent.spend(pattern.search, "some text" * 10, partial=True) is not None
    calls = "It rains. " * 200 + CALLS["json"]
    assert parts_of(read("json", list(calls)), AnswerPart.CALL) == ["weather", "clock"]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ([], "not an object"),
        ({"version": 2}, "version 1"),
        ({"start_anchor": "a"}, "no `fields`"),
        ({"fields": {"content": {}}}, "no `start_anchor`"),
        ({"start_anchor": "a", "fields": {"content": {}, "thinking": {}}}, "several"),
        ({"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}}, "regular expression"),
        ({"start_anchor": "a", "fields": {"content": {"open": [""]}}}, "`open`"),
        ({"start_anchor": "a", "fields": {"content": {"content": "yaml"}}}, "`content`"),
    ],
)
def test_faulty_templates(spec: Any, fault: str):
    with pytest.raises(ValueError, match=fault):
        ResponseTemplate.read(spec)


@pytest.mark.parametrize("name", TEMPLATES)
def test_one_call_at_most(name: str):
    """By the grammar, and if several are in one region or the grammar cannot have the marks, by the reader."""
    template = ResponseTemplate.read(TEMPLATES[name])
    form = AnswerForm(TGI_FORMAT, template.thoughts, {}, template=template)
    use = ToolUse([ToolSpec(tool, parameters=schema) for tool, schema in TOOLS.items()], parallel=False)
    grammar = form.grammar(use, None, thinking=False)
    both = CALLS[name]
    end = {"json": "</call>", "list": "</calls>", "tags": "</function>", "marks": "<tool_call|>", "lines": "\n\n"}[name]
    first = both[: both.index(end) + len(end)]
    for before in ("", "It rains.", "[[ Hm. ]]") if template.thoughts else ("", "It rains."):
        assert takes(grammar, before + first)
        assert not takes(grammar, before + first + both)
        assert not takes(grammar, before + first + " And so on.")
    assert takes(grammar, "It rains.")
    if template.thoughts:
        assert takes(grammar, f"[[ {first} ]]{first}")
    make = form.readers(use, None, thinking=False, prompt="<answer>")
    assert make is not None
    reader = make()
    pieces = [*reader.feed(both), *reader.end()]
    assert [piece.text for piece in pieces if piece.part is AnswerPart.CALL] == ["weather"]
    assert not [piece for piece in pieces if piece.part is AnswerPart.TEXT]
    assert reader.calls == 1


def test_marks_that_no_grammar_has():
    spec: Any = json.loads(json.dumps(TEMPLATES["tags"]))
    spec["fields"]["tool_calls"]["open_pattern"] = r"(?<!`)<function=(?P<name>[^>\n]+)>"
    form = AnswerForm(TGI_FORMAT, None, {}, template=ResponseTemplate.read(spec))
    assert form.grammar(ToolUse([ToolSpec("clock")], parallel=False), None, thinking=False) is None


def test_one_call_at_most_between_special_tokens():
    marks = {2: "<|tool_call>", 3: "<tool_call|>"}
    form = AnswerForm(TGI_FORMAT, None, marks, template=ResponseTemplate.read(TEMPLATES["marks"]))
    grammar = form.grammar(ToolUse([ToolSpec("clock")], parallel=False), None, thinking=False)
    assert takes(grammar, "Well. ", 2, "call:clock{}", 3)
    assert not takes(grammar, 2, "call:clock{}", 3, 2, "call:clock{}", 3)
    assert takes(grammar, "Well.")


def test_only_answers_that_have_no_grammar_are_read_so():
    template = ResponseTemplate.read(TEMPLATES["json"])
    form = AnswerForm(TGI_FORMAT, template.thoughts, {5: "<call>", 6: "<pad>"}, template=template)
    assert form.shown == {5}
    use = ToolUse([ToolSpec("weather", parameters=SCHEMA)])
    assert form.grammar(use, None, thinking=False) is None
    make = form.readers(use, None, thinking=False, prompt="<answer>")
    assert make is not None
    reader = make()
    assert [piece.text for piece in reader.feed("[[Hm.]]Rain.")] == ["Hm.", "Rain."]
    assert not reader.thinking
    must = ToolUse(use.tools, required=True)
    grammar = form.grammar(must, None, thinking=False)
    assert grammar is not None
    assert "_name" in grammar.frame
    answer = Grammar(GrammarKind.JSON_SCHEMA, "{}")
    assert form.grammar(ToolUse(), answer, thinking=False) is not None
