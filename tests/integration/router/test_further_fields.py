"""Fields of OpenAI's routes that clients of OpenAI and of vLLM send: honoured, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.router.conftest import Router, RouterFactory, events, in_one_loop
from tests.integration.router.test_chat import HELLO, TEXT, chat, chat_stream, refusal, text
from tgi_server import demo_model

SCHEMA = {
    "type": "object",
    "properties": {"minutes": {"type": "integer"}},
    "required": ["minutes"],
    "additionalProperties": False,
}


async def sent(router: Router, **body: Any) -> Any:
    """Returns the request that reaches the shards."""
    await chat(router, **body)
    return router.shard.received[-1]


async def test_a_seed_that_is_negative(router: Router):
    first, second = [(await sent(router, seed=-1)).sampling.seed for _ in range(2)]
    assert first != second
    assert (await sent(router, seed=-5)).sampling.seed == 2**64 - 5


async def test_a_top_p_of_nothing_is_the_likeliest_token(router: Router):
    assert not (await sent(router, top_p=0)).sampling.do_sample


async def test_tokens_that_end_the_text(router: Router):
    (dot,) = router.service.text.tokenizer.encode(".", add_special_tokens=False).ids
    (choice,) = (await chat(router, stop_token_ids=[dot]))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Rinse the rice", "stop")
    assert text(await chat_stream(router, stop_token_ids=[dot])) == "Rinse the rice"
    assert "stop_token_ids" in (await refusal(router, stop_token_ids=[2**20]))["error"]["message"]


async def test_at_least_so_many_tokens(router: Router):
    (choice,) = (await chat(router, stop=["Rinse", "rice"], min_tokens=2))["choices"]
    assert choice["message"]["content"] == "Rinse the "
    sampling = (await sent(router, min_tokens=7, stop_token_ids=[9])).sampling
    assert (sampling.min_tokens, 9 in sampling.late_tokens) == (7, True)
    for body in ({"max_tokens": 2}, {"response_format": {"type": "json_object"}}):
        assert "min_tokens" in (await refusal(router, min_tokens=3, **body))["error"]["message"]


async def test_a_stop_sequence_that_is_shown(router: Router):
    (choice,) = (await chat(router, stop="rice", include_stop_str_in_output=True))["choices"]
    assert choice["message"]["content"] == "Rinse the rice"


async def test_special_tokens_that_are_shown(router: Router):
    router.shard.tokens = [0, *router.service.text.tokenizer.encode("Hi", add_special_tokens=False).ids, 1]
    for skip, told in ((True, "Hi"), (False, "<|bos|>Hi")):
        (choice,) = (await chat(router, skip_special_tokens=skip))["choices"]
        assert choice["message"]["content"] == told
        assert text(await chat_stream(router, skip_special_tokens=skip)) == told


@in_one_loop
@pytest.mark.parametrize(
    ("body", "value"),
    [
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"guided_regex": "[a-z]+"}, "[a-z]+"),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "[a-z]+"),
        ({"guided_choice": ["a.b", "c"]}, r"a\.b|c"),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, r"a\.b|c"),
        ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
        ({"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
        ({"guided_json": SCHEMA, "json_schema": SCHEMA}, SCHEMA),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
        ({"regex": "[a-z]+"}, "[a-z]+"),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
    ],
)
async def test_forms_as_other_servers_name_them(shared_router: Router, body: dict[str, Any], value: Any):
    grammar = (await sent(shared_router, **body)).grammar.value
    assert (json.loads(grammar) if isinstance(value, dict) else grammar) == value
    completion = await shared_router.post("/v1/completions", prompt="Hello", max_tokens=5, **body)
    assert completion.status_code == 200
    assert shared_router.shard.received[-1].grammar.value == grammar


@in_one_loop
@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
        {"guided_choice": []},
        {"guided_json": "{"},
        {"structured_outputs": {"structural_tag": "x"}},
        {"guided_whitespace_pattern": " "},
        {"use_beam_search": True},
        {"functions": [{"name": "f"}]},
        {"bad_words": ["x"]},
        {"modalities": ["text", "audio"]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"messages": []}},
        {"prompt_logprobs": 1},
        {"grammar": 'root ::= "a"'},
        {"ebnf": 'root ::= "a"'},
        {"whitespace_pattern": " "},
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        {"best_of": 2},
        {"typical_p": 0.5},
        {"regex": "a", "guided_regex": "b"},
        {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}]},
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(shared_router: Router, body: dict[str, Any]):
    name = "function_call" if "messages" in body else next(iter(body)).removeprefix("guided_")
    told = (await refusal(shared_router, **body))["error"]["message"]
    assert name in told.lower() or "form" in told


async def test_what_says_something_about_the_request_only_is_passed_over(router: Router):
    await chat(
        router,
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        prediction={"type": "content", "content": "x"},
        modalities=["text"],
        functions=[],
        use_beam_search=False,
        request_id="7",
        priority=3,
        guided_decoding_backend="xgrammar",
        stream_options={"include_obfuscation": False},
    )


SWITCHES = ("stream", "stream_options", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


async def test_null_is_not_set(router: Router):
    unset = dict.fromkeys((*SWITCHES, "temperature", "stop", "n", "tools", "parallel_tool_calls", "include_reasoning"))
    outputs = {"json_object": None, "regex": "[A-Z].*", "disable_additional_properties": None}
    await chat(router, **unset, add_generation_prompt=None, structured_outputs=outputs)
    await chat_stream(router, stream_options={"include_usage": None, "continuous_usage_stats": None})
    unset = dict.fromkeys((*SWITCHES, "echo", "add_special_tokens", "best_of", "logprobs", "suffix"))
    assert (await router.post("/v1/completions", prompt="Hello", max_tokens=100, **unset)).status_code == 200
    unset = dict.fromkeys(
        ("tool_choice", "text", "stream", "store", "parallel_tool_calls", "ignore_eos", "metadata", "reasoning")
    )
    assert (await router.post("/v1/responses", input="Hello", **unset)).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_forms_that_tgi_does_not_know_are_refused(router: Router, path: str):
    for body in (
        {"parameters": {"response_format": {"type": "json_object"}}},
        {"parameters": {"guided_json": SCHEMA}},
        {"response_format": {"type": "json_object"}},
        {"grammar": {"type": "json", "value": SCHEMA}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ):
        response = await router.post(path, inputs="Hello", **body)
        assert response.status_code == 422
        name = next(reversed(body.get("parameters", body)))
        assert f"{name}` is not supported" in response.json()["error"]


async def test_tokens_that_the_tokenizer_puts_in_front(router: Router):
    sent_ids = []
    for add in (True, False):
        await router.post("/v1/completions", prompt="Hello", max_tokens=100, add_special_tokens=add)
        sent_ids.append(list(router.shard.received[-1].input_ids))
    encode = router.service.text.tokenizer.encode
    assert sent_ids == [encode("Hello", add_special_tokens=add).ids for add in (True, False)]
    assert (await router.post("/v1/completions", prompt="")).json()["error"]["message"].count("`prompt`") == 1


async def test_thoughts_that_nobody_wants_to_see(routers: RouterFactory):
    router = await routers(reasoning_parser="qwen3")
    router.say(f"<think>Hm.</think>\n{TEXT}")
    (choice,) = (await chat(router, include_reasoning=False))["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT}
    chunks = await chat_stream(router, include_reasoning=False)
    assert text(chunks) == TEXT
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)
    router.say("<think>Hm.")
    (choice,) = (await chat(router, include_reasoning=False))["choices"]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": ""}, "stop")


async def test_usage_in_every_chunk(router: Router):
    length = router.say(TEXT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await chat_stream(router, stream_options=options)
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] == last["usage"]["completion_tokens"] == length
    body = {"prompt": "Hello", "max_tokens": 100, "stream": True, "stream_options": options}
    *chunks, last, _ = events((await router.post("/v1/completions", **body)).text)
    told = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert 0 < told[0] < told[-1] == json.loads(last)["usage"]["completion_tokens"] == length


async def test_as_many_alternatives_as_asked_for(router: Router, monkeypatch: pytest.MonkeyPatch):
    """Shards tell those that are as likely as the last, too."""
    following = router.shard._next

    def with_ties(row: Any) -> Any:
        generation = following(row)
        generation.top_tokens[0].ids.extend([50, 51])
        generation.top_tokens[0].logprobs.extend([-0.25, -0.25])
        return generation

    monkeypatch.setattr(router.shard, "_next", with_ties)
    (choice,) = (await chat(router, logprobs=True, top_logprobs=20))["choices"]
    chunks = await chat_stream(router, logprobs=True, top_logprobs=20)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    for entries in (choice["logprobs"]["content"], streamed):
        assert {len(entry["top_logprobs"]) for entry in entries} == {20}


async def test_cached_tokens_of_the_prompt(router: Router):
    long = {"messages": [{"role": "user", "content": TEXT * 10}], "max_tokens": 1, "cache_salt": "a"}
    usages = [(await chat(router, **long))["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in usages] == [False, True]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == usages[1]["prompt_tokens"] - 1
    chunks = await chat_stream(router, **long, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    completion = {"prompt": [TEXT * 10, TEXT * 9], "max_tokens": 1, "n": 2, "cache_salt": "a"}
    await router.post("/v1/completions", **completion)
    usage = (await router.post("/v1/completions", **completion)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 2


async def test_cached_tokens_do_not_tell_a_secret_digit_by_digit(router: Router):
    """Who guesses the end of another's prompt is not told how much of the guess is right."""

    secret = f"{TEXT * 30} The code is "
    await router.post("/v1/completions", prompt=f"{secret}471922.", max_tokens=1)
    told = set()
    for guess in ("8", "4", "40", "47", "471", "4719", "47192", "471922", "471922."):
        answer = (await router.post("/v1/completions", prompt=f"{secret}{guess}", max_tokens=1)).json()
        told.add(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    (shown,) = told
    assert shown > 0
    assert shown % 128 == 0


async def test_a_developer_where_the_template_knows_none(router: Router):
    developer = [{"role": "developer", "content": "Be brief."}, *HELLO]
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    texts = [(await router.post("/chat_tokenize", messages=each)).json() for each in (developer, system)]
    assert texts[0] == texts[1]


async def test_messages_as_other_servers_write_them(router: Router):
    refused = [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HELLO]
    said = [*HELLO, {"role": "assistant", "content": "No.", "refusal": None, "function_call": None}, *HELLO]
    texts = [(await router.post("/chat_tokenize", messages=each)).json()["templated_text"] for each in (refused, said)]
    assert texts[0] == texts[1]
    assert "No." in texts[0]


TEMPLATE = """
{%- for message in messages %}[{{ message.role }}]{{ message.reasoning_content }}{{ message.content }}{% endfor -%}
{%- if enable_thinking is defined and not enable_thinking %}(no thinking){% endif -%}
{%- if reasoning_effort %}({{ reasoning_effort }}){% endif -%}
{%- for document in documents or [] %}<{{ document.title }}>{% endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif -%}
"""


async def test_what_is_told_to_the_template(routers: RouterFactory, tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE + "{# developer #}")
    router = await routers(tokenizer_config_path=file)

    async def shown(**body: Any) -> str:
        response = await router.post("/chat_tokenize", **{"messages": HELLO, **body})
        return str(response.json()["templated_text"])

    assert await shown() == "[user]Hello[assistant]"
    assert await shown(chat_template_kwargs={"enable_thinking": False}) == "[user]Hello(no thinking)[assistant]"
    assert await shown(reasoning_effort="low") == "[user]Hello(low)[assistant]"
    assert await shown(reasoning_effort="none") == "[user]Hello(no thinking)(none)[assistant]"
    assert await shown(documents=[{"title": "T"}]) == "[user]Hello<T>[assistant]"
    assert await shown(add_generation_prompt=False) == "[user]Hello"
    assert await shown(continue_final_message=True) == "[user]Hello"
    answered = [*HELLO, {"role": "assistant", "content": "Well"}]
    assert await shown(messages=answered) == "[user]Hello[assistant]Well"
    assert await shown(messages=answered, continue_final_message=False) == "[user]Hello[assistant]Well[assistant]"
    for name in ("reasoning", "reasoning_content"):
        thought = {"role": "assistant", "content": "Well", name: "Hm."}
        assert await shown(messages=[*HELLO, thought, *HELLO]) == "[user]Hello[assistant]Hm.Well[user]Hello[assistant]"
    assert await shown(messages=[{"role": "developer", "content": "x"}]) == "[developer]x[assistant]"


async def test_the_models_own_defaults(routers: RouterFactory, tmp_path: Path):
    for file in demo_model.PATH.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    defaults = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.5, "max_new_tokens": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    router = await routers(tokenizer_name=tmp_path)
    sampling = (await sent(router)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.5, 20, 0.75, 1.5)
    sampling = (await sent(router, temperature=1.0, top_p=1.0, top_k=-1)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
    await router.post("/generate", inputs="Hello", parameters={})
    assert router.shard.received[-1].sampling.repetition_penalty == 1.0
    plain = await routers(tokenizer_name=tmp_path, generation_config="none")
    assert (await sent(plain)).sampling.top_k == 0


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}, None),
        ("/generate", {"inputs": "a", "max_new_tokens": 2}, "max_new_tokens (did you mean parameters.max_new_tokens?)"),
        ("/generate", {"inputs": "a", "tempreature": 1}, "tempreature (did you mean parameters.temperature?)"),
        (
            "/generate",
            {"inputs": "a", "parameters": {"max_tokens": 2}},
            "parameters.max_tokens (did you mean parameters.max_new_tokens?)",
        ),
        (
            "/generate_stream",
            {"inputs": "a", "zzz": 1, "parameters": {"tempreature": 2}},
            "zzz; parameters.tempreature ",
        ),
        ("/v1/chat/completions", {"messages": HELLO, "tempreature": 1}, "tempreature (did you mean temperature?)"),
        ("/v1/chat/completions", {"messages": HELLO, "tempreature": 1, "stream": True}, "tempreature (did you mean"),
        ("/v1/chat/completions", {"messages": HELLO, "stream_options": {"usage": True}}, "stream_options.usage"),
        ("/v1/chat/completions", {"messages": [{**HELLO[0], "mood": "good"}], "user": "me"}, "messages[0].mood"),
        ("/v1/chat/completions", {"messages": HELLO, "user": "me", "store": False, "mood": None}, None),
        ("/v1/completions", {"prompt": "a", "max_new_tokens": 2}, "max_new_tokens (did you mean max_tokens?)"),
        ("/v1/responses", {"input": "a", "temprature": 1}, "temprature (did you mean temperature?)"),
        ("/invocations", {"inputs": "a", "temperature": 1}, "temperature (did you mean parameters.temperature?)"),
    ],
)
async def test_unknown_fields_are_named(
    router: Router, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], ignored: str | None
):
    for _ in range(2):
        response = await router.post(path, **body)
        assert response.status_code == 200
        told = response.headers.get("x-ignored-fields")
        assert told is None if ignored is None else told.startswith(ignored)
    logged = [message for message in caplog.messages if "is ignored: it" in message]
    assert len(logged) == (0 if told is None else len(told.split("; ")))


async def test_unknown_fields_are_refused_on_demand(routers: RouterFactory):
    router = await routers(strict_fields=True)
    refused = await router.post("/v1/chat/completions", messages=HELLO, tempreature=1)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"] == "`tempreature` is not a field of this request; did you mean `temperature`?"
    assert error["param"] == "tempreature"
    refused = await router.post("/generate", inputs="a", parameters={"x" * 10_000: 1})
    assert (refused.status_code, len(refused.json()["error"]) < 300) == (422, True)
    assert (await router.post("/v1/chat/completions", messages=HELLO, user="me")).status_code == 200
    assert (await router.post("/generate", inputs="a", parameters={"seed": 1})).status_code == 200


async def test_a_budget_of_thoughts(routers: RouterFactory):
    router = await routers(reasoning_parser="qwen3")
    budget = (await sent(router, thinking_token_budget=7)).thought_budget
    assert (budget.tokens, budget.begin, budget.end, budget.open) == (7, "<think>", "</think>", False)
    assert router.service.text.tokenizer.decode(budget.closing) == "</think>"
    begun = [*HELLO, {"role": "assistant", "content": "<think>"}]
    opened = (await sent(router, messages=begun, reasoning_budget=0)).thought_budget
    assert (opened.tokens, opened.open) == (0, True)
    for body in (
        {},
        {"thinking_token_budget": None},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 7, "structured_outputs": {"regex": "[a-z]+"}},  # behind which there are no thoughts
    ):
        assert not (await sent(router, **body)).HasField("thought_budget")
    assert "-2" in (await refusal(router, thinking_token_budget=-2))["error"]["message"]
    both = {"thinking_token_budget": 7, "allowed_token_ids": [5]}
    assert "allowed_token_ids" in (await refusal(router, **both))["error"]["message"]


async def test_every_interface_has_budgets_of_thoughts(routers: RouterFactory):
    router = await routers(reasoning_parser="qwen3")
    limit = {"thinking_token_budget": 7}
    thinking = {"type": "enabled", "budget_tokens": 7}
    for path, body in (
        ("/generate", {"inputs": "<think>", "parameters": limit}),
        ("/v1/completions", {"prompt": "<think>", **limit}),
        ("/v1/responses", {"input": "Hello", **limit}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 50, "thinking": thinking}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 50, **limit}),
    ):
        response = await router.post(path, **body)
        assert response.status_code == 200, response.text
        budget = router.shard.received[-1].thought_budget
        assert (budget.tokens, budget.open) == (7, "<think>" in body.values())
    both = {"thinking": thinking, "allowed_token_ids": [5]}
    response = await router.post("/v1/messages", messages=HELLO, max_tokens=50, **both)
    assert response.status_code == 400
    assert "`thinking.budget_tokens` cannot be used with `allowed_token_ids`" in response.json()["error"]["message"]


async def test_a_model_without_thoughts_refuses_their_budget(router: Router):
    told = await refusal(router, thinking_token_budget=7)
    assert told["error"]["param"] == "thinking_token_budget"
    response = await router.post("/generate", inputs="Hello", parameters={"reasoning_budget": 7})
    assert response.status_code == 422
    assert "thinking_token_budget" in response.json()["error"]
    # Anthropic's clients have to send one.
    thinking = {"type": "enabled", "budget_tokens": 1024}
    response = await router.post("/v1/messages", messages=HELLO, max_tokens=2000, thinking=thinking)
    assert response.status_code == 200
    assert not router.shard.received[-1].HasField("thought_budget")
