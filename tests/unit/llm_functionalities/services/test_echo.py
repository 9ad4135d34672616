"""The part of a prompt that its answer repeats."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_functionalities.services.echo import EchoedAnswer, open_object
from tests.timing import on_a_busy_machine

FORMAT = 'Answer in this form: {"intent": ""}\n### Input:\nPizza!\n\n### Response: Your response:'


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        (FORMAT + '{"intent":', '{"intent":'),
        (FORMAT + '{"intent": ', '{"intent": '),
        (FORMAT + '{"name"', '{"name"'),
        (FORMAT + '{"step_text": "', '{"step_text": "'),
        (FORMAT + '{"step_text": "Melt the ', '{"step_text": "Melt the '),
        (FORMAT + '{"int', '{"int'),
        (FORMAT + "{", "{"),
        (FORMAT + '{"a": [1, {"b": ', '{"a": [1, {"b": '),
        (FORMAT + '{"a": 1,', '{"a": 1,'),
        (FORMAT + '{"a": "say \\"', '{"a": "say \\"'),
        (FORMAT, ""),
        (FORMAT + '{"done": tru', '{"done": tru'),
        ('As {"steps": [<step>, ...], "intent": <intent>}: {"intent":', '{"intent":'),
        ("", ""),
        ("Hello", ""),
        ('{"intent": "x"}', ""),
        ('{"intent": "x"} and so on', ""),
        ("Call him {name} or {", "{"),
        ('int main() {\n  puts("x");', ""),
        ('{ "use strict"; foo(', ""),
        ("[1, 2", ""),
        ('{"intent":' + " " * 2000, ""),  # nobody looks that far
    ],
)
def test_the_object_that_a_prompt_leaves_open(prompt: str, opening: str) -> None:
    assert open_object(prompt) == opening


@pytest.mark.parametrize(
    ("prompt", "written", "answer"),
    [
        ('{"intent":', ' "go_on"}', '{"intent": "go_on"}'),
        ('{"intent":', ' "go_on"}\n\n### Instruction: {"intent": "x"}', '{"intent": "go_on"}'),
        ('{"name"', ': "oat milk", "amount": "1 cup"} ', '{"name": "oat milk", "amount": "1 cup"}'),
        ('{"step_text": "', 'Say \\"}\\" to it."} Done.', '{"step_text": "Say \\"}\\" to it."}'),
        ('{"a": {"b": [', '1, 2]}, "c": "}"} {', '{"a": {"b": [1, 2]}, "c": "}"}'),
        ('{"intent":', ' "cut o', '{"intent": "cut o'),
        ("{", '"intent": "x"} y', '{"intent": "x"}'),
        ("{", "\n  return 1; }\n", "return 1; }"),
        ("Hello", " there, {you} \n", "there, {you}"),
    ],
)
def test_an_object_comes_back_whole_and_nothing_else_of_the_prompt(prompt: str, written: str, answer: str) -> None:
    prompt = FORMAT + prompt
    assert EchoedAnswer(prompt, "object", has_grammar=False).whole(written) == answer
    assert EchoedAnswer(prompt, "none", has_grammar=False).whole(written) == written.strip()


def test_an_answer_with_a_grammar_completes_no_object() -> None:
    written = '{"intent": "go_on"}'
    assert EchoedAnswer(FORMAT + '{"intent":', "object", has_grammar=True).whole(written) == written


@pytest.mark.parametrize(
    ("prompt", "written", "answer"),
    [
        ("\nHello", " there \n", "\nHello there"),
        (FORMAT + '{"intent":', ' "go_on"} and so on', FORMAT + '{"intent": "go_on"}'),
        ("class A {", " int b; }\n", "class A { int b; }"),
    ],
)
def test_a_whole_prompt_comes_back_with_its_object_closed(prompt: str, written: str, answer: str) -> None:
    assert EchoedAnswer(prompt, "prompt", has_grammar=False).whole(written) == answer


@pytest.mark.parametrize("echo", ["object", "prompt"])
def test_a_caller_finds_the_object_behind_the_last_brace(echo) -> None:
    text = EchoedAnswer(FORMAT + '{"intent":', echo, has_grammar=False).whole(' "go_on"}\n### Input: {')
    assert json.loads(text[text.rindex("{") :]) == {"intent": "go_on"}


@given(
    st.sampled_from(["object", "prompt", "none"]),
    st.sampled_from(["Hello", FORMAT + '{"intent":', FORMAT + "{", FORMAT + '{"a": "']),
    st.lists(st.sampled_from(['"', "\\", "}", "{", "]", "a", " ", '"x": 1', "\n"]), min_size=1, max_size=20),
)
def test_pieces_come_to_the_same_as_the_whole(echo, prompt: str, pieces: list[str]) -> None:
    answer = EchoedAnswer(prompt, echo, has_grammar=False)
    joined = "".join(answer.add(piece) for piece in pieces)
    assert joined == EchoedAnswer(prompt, echo, has_grammar=False).add("".join(pieces))


TEXT = st.text(st.characters(exclude_characters="{", exclude_categories=["Cs"]), max_size=5)
VALUE = st.recursive(st.none() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(TEXT, VALUE, min_size=1, max_size=3))
def test_any_object_is_completed_wherever_its_prompt_breaks_off(value: dict[str, object]) -> None:
    text = json.dumps(value)
    for place in range(1, len(text)):
        if not (opening := open_object(text[:place])):
            continue  # within a number, a word, or an escape
        assert opening == text[:place]
        assert json.loads(EchoedAnswer(text[:place], "object", has_grammar=False).whole(text[place:] + " and")) == value


@on_a_busy_machine
def test_a_prompt_full_of_braces_takes_no_time() -> None:
    started = time.monotonic()
    open_object('{"a":' * 100_000)
    open_object("{" * 100_000)
    open_object('{"' * 100_000)
    assert time.monotonic() - started < 0.5
