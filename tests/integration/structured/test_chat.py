"""`response_format` and `tools` with the `openai` client, through a real server."""

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.integration.structured.test_generate import GRAMMARS, SCHEMA
from tests.servers import TextGenerationServer

MESSAGES: Any = [{"role": "user", "content": "Set a timer for the eggs, please."}]
TIMER = {
    "type": "object",
    "properties": {
        "minutes": {"type": "integer", "minimum": 1, "maximum": 90},
        "sound": {"enum": ["bell", "gong"]},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["minutes", "sound", "note"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"day": {"type": "string", "format": "date"}},
    "required": ["day"],
    "additionalProperties": False,
}
SCHEMAS = {"set_timer": TIMER, "weather": WEATHER}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture
def client(demo_server: TextGenerationServer) -> OpenAI:
    return OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 150, **options}
    )


def check_call(function: Any) -> None:
    jsonschema.validate(json.loads(function.arguments), SCHEMAS[function.name])


def test_response_formats(client: OpenAI) -> None:
    for grammar, check in GRAMMARS.values():
        whole = ask(client, response_format=grammar).choices[0]
        assert whole.finish_reason == "stop"
        assert check(whole.message.content), whole.message.content
        chunks = list(ask(client, response_format=grammar, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def test_openais_own_form_of_a_schema(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "dish", "strict": True, "schema": SCHEMA}}
    for seed in range(3):
        answer = ask(client, response_format=form, temperature=1.3, seed=seed).choices[0]
        jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    anything = ask(client, response_format={"type": "json_object"}, max_tokens=400).choices[0]
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content), dict)


# A constraint that no grammar can be made of.
UNLIKE = {"type": "integer", "minimum": 1, "maximum": 9, "not": {"multipleOf": 7}}
NUMBERS = {"type": "object", "properties": {"n": UNLIKE}, "required": ["n"], "additionalProperties": False}


def test_what_cannot_be_enforced_is_told_unless_the_format_is_strict(client: OpenAI) -> None:
    config = {"name": "numbers", "schema": NUMBERS}
    raw = client.chat.completions.with_raw_response
    options: Any = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    answer = raw.create(**options, response_format={"type": "json_schema", "json_schema": config})
    assert answer.headers["x-unenforced-constraints"] == "not at #/properties/n"
    assert 1 <= json.loads(answer.parse().choices[0].message.content or "")["n"] <= 9
    streamed = raw.create(**options, stream=True, response_format={"type": "json_schema", "json_schema": config})
    assert streamed.headers["x-unenforced-constraints"] == "not at #/properties/n"
    for form in ({"json_schema": {**config, "strict": True}}, {"value": config}):
        with pytest.raises(openai.BadRequestError, match="'not' \\(at #/properties/n\\)"):
            raw.create(**options, response_format={"type": "json_schema", **form})
    assert "x-unenforced-constraints" not in raw.create(**options).headers


def test_a_tool_that_no_grammar_can_be_made_of_is_offered_without_one(client: OpenAI) -> None:
    broken = {"name": "broken", "parameters": {"type": "object", "properties": {"a": 3}}}
    tools: Any = [*TOOLS, {"type": "function", "function": broken}]
    options: Any = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 60, "tools": tools}
    answer = client.chat.completions.with_raw_response.create(**options)
    assert "at #/$defs/broken" in answer.headers["x-unenforced-constraints"]
    assert answer.parse().choices
    named: Any = {"type": "function", "function": {"name": "set_timer"}}
    check_call(ask(client, tools=tools, tool_choice=named).choices[0].message.tool_calls[0].function)
    tools[-1]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="broken"):
        client.chat.completions.create(**options)


def test_parameters_may_be_whatever_a_grammar_takes(client: OpenAI) -> None:
    shapes = [
        {"type": "object", "properties": {"kind": {"const": kind}, "size": {"type": "integer"}}, "required": ["kind"]}
        for kind in ("circle", "square")
    ]
    parameters = {"oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}]}
    parameters["$defs"] = dict(zip(("circle", "square"), shapes, strict=True))
    tools: Any = [{"type": "function", "function": {"name": "draw", "parameters": parameters, "strict": True}}]
    for options in ({}, {"stream": True}):
        answer = ask(client, tools=tools, tool_choice="required", max_tokens=200, **options)
        if options:
            deltas = [delta for chunk in answer for delta in chunk.choices[0].delta.tool_calls or []]
            arguments = "".join(delta.function.arguments or "" for delta in deltas)
        else:
            arguments = answer.choices[0].message.tool_calls[0].function.arguments
        jsonschema.validate(json.loads(arguments), parameters)


def test_several_choices(client: OpenAI) -> None:
    answer = ask(client, response_format=GRAMMARS["regex"][0], n=3, temperature=1.2, seed=1)
    assert len(answer.choices) == 3
    assert all(GRAMMARS["regex"][1](choice.message.content) for choice in answer.choices)


def test_required_tools(client: OpenAI) -> None:
    for seed in range(3):
        choice = ask(client, tools=TOOLS, tool_choice="required", temperature=1.5, seed=seed).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        check_call(choice.message.tool_calls[0].function)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_tool(client: OpenAI, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    (call,) = ask(client, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
    assert call.function.name == name
    check_call(call.function)


def test_tools_that_must_not_be_called(client: OpenAI) -> None:
    """They stay in the prompt, so that its cached prefix is found; the grammar allows text alone."""
    answer, called = ask(client, tools=TOOLS, tool_choice="none"), ask(client, tools=TOOLS)
    message = answer.choices[0].message
    assert message.tool_calls is None
    assert message.content
    assert answer.usage is not None
    assert called.usage is not None
    assert answer.usage.prompt_tokens == called.usage.prompt_tokens


def test_tools_that_may_be_called(client: OpenAI) -> None:
    """The model calls a tool or writes a text: either has the right form, and is the same streamed and whole."""
    for seed in range(3):
        options = {"tools": TOOLS, "temperature": 1.5, "seed": seed}
        choice = ask(client, **options).choices[0]
        with client.chat.completions.stream(model="tgi", messages=MESSAGES, max_tokens=150, **options) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.message.content == choice.message.content
        if choice.message.tool_calls:
            check_call(choice.message.tool_calls[0].function)
            assert streamed.message.tool_calls[0].function.arguments == choice.message.tool_calls[0].function.arguments
        else:
            assert choice.message.content


def test_a_call_is_streamed_as_deltas(client: OpenAI) -> None:
    whole = ask(client, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0].function
    chunks = list(ask(client, tools=TOOLS, tool_choice="required", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0
    deltas = [delta for chunk in chunks[:-1] for delta in chunk.choices[0].delta.tool_calls or []]
    assert len(deltas) > 3
    assert [delta.function.name for delta in deltas if delta.function.name] == [whole.name]
    assert "".join(delta.function.arguments or "" for delta in deltas) == whole.arguments
    assert {delta.id for delta in deltas if delta.id} == {deltas[0].id}
    assert chunks[-2].choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_after_a_call(client: OpenAI) -> None:
    message = ask(client, tools=TOOLS, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rings in 4 minutes."}
    answer = ask(client, messages=[*MESSAGES, message, result], tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content


def test_a_tool_without_parameters(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "stop_everything"}}]
    (call,) = ask(client, tools=tools, tool_choice="required").choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("stop_everything", {})


def test_the_usage_of_a_streamed_call_that_comes_at_once(client: OpenAI) -> None:
    """All of it is forced by the grammar, so that its name and its end are known in the same step."""
    tools: Any = [{"type": "function", "function": {"name": "stop_everything"}}]
    whole = ask(client, tools=tools, tool_choice="required").usage
    chunks = ask(client, tools=tools, tool_choice="required", stream=True, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in chunks][-1].prompt_tokens == whole.prompt_tokens


LINES = r"""
start: "say \"" word ("\", \"" word) ~ 1..2 "\"" LF
word: /[a-z\\\t]{1,4}/
%import common.LF
"""
SUMS = r"""
start: "=" sum "\n"
sum: DIGIT | "(" DIGIT "+" sum ")"
%import common.DIGIT
"""
LANGUAGES = {LINES: r'say "[a-z\\\t]{1,4}(", "[a-z\\\t]{1,4}){1,2}"\n', SUMS: r"=(\([0-9]\+)*[0-9]\)*\n"}


@pytest.mark.parametrize("definition", LANGUAGES, ids=["lines", "sums"])
def test_the_text_of_a_tool_has_its_grammar(client: OpenAI, definition: str) -> None:
    grammar = {"syntax": "lark", "definition": definition}
    in_chats: Any = [{"type": "custom", "custom": {"name": "say", "format": {"type": "grammar", "grammar": grammar}}}]
    in_responses: Any = [{"type": "custom", "name": "say", "format": {"type": "grammar", **grammar}}]
    called = 0
    for seed in range(3):
        chosen = ask(client, tools=in_chats, tool_choice="required", temperature=1.2, seed=seed).choices[0]
        if chosen.finish_reason == "tool_calls":
            text = chosen.message.tool_calls[0].custom.input
            assert re.fullmatch(LANGUAGES[definition], text), text
            called += 1
        response = client.responses.create(
            **{"model": "tgi", "input": "Say it.", "tools": in_responses, "tool_choice": "required"},
            max_output_tokens=150,
            temperature=1.2,
            extra_body={"seed": seed},
        )
        if response.status == "completed":
            (item,) = response.output
            assert item.type == "custom_tool_call"
            assert re.fullmatch(LANGUAGES[definition], item.input), item.input
            called += 1
    assert called


def test_the_grammar_of_a_tools_text_that_is_not_supported_is_refused(client: OpenAI) -> None:
    grammar = {"syntax": "lark", "definition": "start: /a+?b/"}
    tools: Any = [{"type": "custom", "custom": {"name": "say", "format": {"type": "grammar", "grammar": grammar}}}]
    with pytest.raises(openai.BadRequestError, match=r"say/properties/input: lazy repetitions .* \(\+\?\)"):
        ask(client, tools=tools)
    shown: Any = [{"type": "custom", "name": "say", "format": {"type": "grammar", **grammar}}]
    with pytest.raises(openai.BadRequestError, match=r"say/properties/input: lazy repetitions"):
        client.responses.create(model="tgi", input="Say it.", tools=shown)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"response_format": {"type": "regex", "value": "(a"}}, "regular expression"),
        ({"response_format": {"type": "json", "value": {"pattern": "(?=a)b"}}}, "'pattern'"),
        ({"response_format": {"type": "json", "value": "{"}}, "not JSON"),
        ({"response_format": {"type": "lark", "value": "start: missing"}}, "missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "'f'"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_openais_form(
    client: OpenAI, options: dict[str, Any], told: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, stream=stream, **options)
    assert told in refused.value.body["message"]  # type: ignore[index]
    assert refused.value.type == "invalid_request_error"
