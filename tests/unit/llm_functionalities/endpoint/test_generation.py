"""The parameters of a generation, as the text-generation API takes them."""

import json

from llm_functionalities.endpoint.generation import GenerationParameters, Grammar


def test_the_parameters_of_a_request() -> None:
    assert GenerationParameters(7).parameters() == {
        "max_new_tokens": 7,
        "grammar": None,
        "adapter_id": None,
        "stop": None,
        "return_full_text": False,
    }
    drawn = GenerationParameters(7, sampling={"temperature": 0.7, "do_sample": True}, stop=["."]).parameters()
    assert (drawn["temperature"], drawn["do_sample"], drawn["stop"]) == (0.7, True, ["."])
    with_grammar = GenerationParameters(7, Grammar(regex="[0-9]+"), grammar_is_optional=True)
    assert with_grammar.parameters()["grammar"] == {"type": "regex", "value": "[0-9]+"}
    assert with_grammar.without_grammar() == GenerationParameters(7)


def test_a_schema_is_sent_as_it_is() -> None:
    assert Grammar(json_schema={"type": "object"}).payload == {"type": "json", "value": {"type": "object"}}


def test_a_null_in_a_schema_is_not_lost() -> None:
    schema = {"properties": {"a": {"const": None}}}
    value = Grammar(json_schema=schema).payload["value"]
    assert isinstance(value, str)
    assert json.loads(value) == schema
