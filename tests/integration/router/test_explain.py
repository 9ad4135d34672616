"""A prompt that was not wholly found in the prefix cache: the cause is named, in the response, the log and a metric."""

import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.integration.router.conftest import Router, RouterFactory, events, in_one_loop, running_router

# ChatML with tools. It leaves out the thoughts of earlier answers, and shows what time it is if it is told to.
TEMPLATE = """\
{%- if clock %}<|system|>It is {{ strftime_now('%S.%f') }}.
{% endif %}
{%- if style %}<|system|>Style: {{ style }}
{% endif %}
{%- if tools %}<|system|>Tools:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or () %}{{ call.function | tojson }}{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if thoughts %}<think>{% endif %}{% endif %}"""
WORDS = (
    "rinse the rice until water is clear then let it stand for ten minutes in a warm place and stir slowly",
    "while onions brown with butter salt pepper sugar flour eggs milk bread knife board oven paint",
)


Body = dict[str, Any]


def text(seed: object, words: int = 60) -> str:
    """Returns words that begin like no other text."""
    return " ".join(random.Random(str(seed)).choices(" ".join(WORDS).split(), k=words))


def chat(*messages: str | tuple[str, Any] | dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the body of a chat. Messages without a role: of the system, the user, the assistant, the user ..."""
    roles = ["system", *["user", "assistant"] * len(messages)]
    shown: list[dict[str, Any]] = []
    for role, message in zip(roles, messages, strict=False):
        if isinstance(message, dict):
            shown.append(message)
        else:
            shown.append(
                {"role": role, "content": message}
                if isinstance(message, str)
                else {"role": message[0], "content": message[1]}
            )
    return {"messages": shown, **more}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": {key: {"type": each} for key, each in properties.items()}},
    }
    return {"type": "function", "function": function}


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, **more}


def weather(own: str) -> Body:
    return tool("weather", text(own + "weather", 20), city="string", day="string")


def lamp(own: str) -> Body:
    return tool("lamp", text(own + "lamp", 20), room="string")


def music(own: str) -> Body:
    return tool("music", text(own + "music", 20))


CALL = {"id": "call00000", "type": "function"}


def calling(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "function": {"name": "lamp", "arguments": arguments}}],
    }


def answer_of_tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00000", "content": content}


@dataclass(frozen=True)
class Case:
    """Two requests, made of a text that no other case has, and what is said of the second.

    answer: what the model says to both. place: None: no difference is shown. path: of both.
    """

    name: str
    cause: str | None
    first: Callable[[str], Body]
    second: Callable[[str], Body]
    place: str | None = None
    offset: int | None = None
    path: str = "/v1/chat/completions"
    answer: str = "Rinse the rice. Then boil it."
    salts: tuple[str | None, str | None] = ("s", "s")


LONG = text("a question", 40)
HISTORY = [text(f"turn {index}", 30) for index in range(8)]


def parts(*texts: str) -> list[Body]:
    return [{"type": "text", "text": each} for each in texts]


CASES = [
    # Nothing is missing, or there is nothing to find.
    Case("the same prompt", None, lambda t: chat(t, LONG), lambda t: chat(t, LONG)),
    Case(
        "a prompt of few tokens again",
        None,
        lambda t: completion(t[:20]),
        lambda t: completion(t[:20]),
        path="/v1/completions",
    ),
    Case(
        "another prompt",
        "never_seen",
        lambda t: chat(t, LONG),
        lambda t: chat(text(t + "b"), text(t + "c")),
        "messages[0]",
        0,
    ),
    Case(
        "the next turn",
        "never_seen",
        lambda t: chat(t, LONG),
        lambda t: chat(t, LONG, "Rinse the rice. Then boil it.", "And then, what is next?"),
    ),
    Case(
        "another question after the same instructions",
        "never_seen",
        lambda t: chat(t, "What is the time?"),
        lambda t: chat(t, "Turn the light off, please."),
        "messages[1]",
        0,
    ),
    Case(
        "the end of a message was written anew",
        "never_seen",
        lambda t: chat(t, "How do I make bread with salt?"),
        lambda t: chat(t, "How do I make a wooden table?"),
        "messages[1]",
        14,
    ),
    Case(
        "a message goes on",
        "never_seen",
        lambda t: chat(t, "How do I"),
        lambda t: chat(t, "How do I " + LONG),
        "messages[1]",
        8,
    ),
    # Something at the beginning was changed, and all after it is computed again.
    Case(
        "a date in the first line",
        "changed",
        lambda t: chat("Today is Monday, 12:30. " + t, LONG),
        lambda t: chat("Today is Monday, 12:31. " + t, LONG),
        "messages[0]",
        21,
    ),
    Case(
        "a date in the last line of the instructions",
        "changed",
        lambda t: chat(t + " It is 12:30.", LONG),
        lambda t: chat(t + " It is 12:31.", LONG),
        "messages[0]",
    ),
    Case(
        "another id in a header block",
        "changed",
        lambda t: chat("x-id: 5f0c\n" + t, LONG),
        lambda t: chat("x-id: a91e\n" + t, LONG),
        "messages[0]",
        6,
    ),
    Case(
        "a changed header block of many lines",
        "changed",
        lambda t: chat("cwd: /a\nbranch: main\nfiles: 3\n" + t, LONG),
        lambda t: chat("cwd: /b/c\nbranch: fix\nfiles: 17\n" + t, LONG),
        "messages[0]",
        6,
    ),
    Case(
        "changed instructions",
        "changed",
        lambda t: chat(text(t, 30), LONG),
        lambda t: chat(text(t + "2", 30), LONG),
        "messages[0]",
    ),
    Case(
        "more instructions", "changed", lambda t: chat(t, LONG), lambda t: chat(t + " Be brief.", LONG), "messages[0]"
    ),
    Case(
        "less instructions", "changed", lambda t: chat(t + " Be brief.", LONG), lambda t: chat(t, LONG), "messages[0]"
    ),
    Case("no instructions", "changed", lambda t: chat(text(t, 9), LONG), lambda t: chat(("user", LONG)), "messages[0]"),
    Case(
        "two spaces in place of one",
        "changed",
        lambda t: chat(t, LONG),
        lambda t: chat(t.replace(" ", "  ", 1), LONG),
        "messages[0]",
    ),
    Case(
        "a line's end after the instructions",
        "changed",
        lambda t: chat(t, LONG),
        lambda t: chat(t + "\n", LONG),
        "messages[0]",
    ),
    Case(
        "a capital letter", "changed", lambda t: chat(t, LONG), lambda t: chat(t.capitalize(), LONG), "messages[0]", 0
    ),
    Case(
        "members of JSON in another order",
        "changed",
        lambda t: chat('{"room": "kitchen", "light": 3} ' + t, LONG),
        lambda t: chat('{"light": 3, "room": "kitchen"} ' + t, LONG),
        "messages[0]",
        2,
    ),
    Case(
        "the beginning of a long question",
        "changed",
        lambda t: chat(t, "Please: " + LONG),
        lambda t: chat(t, "Well: " + LONG),
        "messages[1]",
        0,
    ),
    Case(
        "one part of several",
        "changed",
        lambda t: chat(("system", parts(t, "It is 12:30.")), LONG),
        lambda t: chat(("system", parts(t, "It is 12:31.")), LONG),
        "messages[0].content[1]",
        10,
    ),
    # The conversation was changed.
    Case(
        "a trimmed history",
        "changed",
        lambda t: chat(t, *HISTORY[:5]),
        lambda t: chat(t, *HISTORY[2:7]),
        "messages[1]",
        0,
    ),
    Case(
        "a history that was summed up",
        "changed",
        lambda t: chat(t, *HISTORY[:5]),
        lambda t: chat(t, "So far: rice.", *HISTORY[3:7]),
        "messages[1]",
        0,
    ),
    Case(
        "a message in between",
        "changed",
        lambda t: chat(t, *HISTORY[:5]),
        lambda t: chat(t, *HISTORY[:2], "Wait.", "Yes?", *HISTORY[2:5]),
        "messages[3]",
        0,
    ),
    Case(
        "two messages the other way round",
        "changed",
        lambda t: chat(t, *HISTORY[:5]),
        lambda t: chat(t, *HISTORY[2:4], *HISTORY[:2], HISTORY[4]),
        "messages[1]",
        0,
    ),
    Case(
        "another role",
        "changed",
        lambda t: chat(t, ("user", HISTORY[0]), LONG, LONG),
        lambda t: chat(t, ("assistant", HISTORY[0]), LONG, LONG),
        "messages[1]",
    ),
    Case(
        "an earlier question was corrected",
        "changed",
        lambda t: chat(t, *HISTORY[:3]),
        lambda t: chat(t, "No: " + HISTORY[0], *HISTORY[1:3]),
        "messages[1]",
        0,
    ),
    Case(
        "the result of a tool",
        "changed",
        lambda t: chat(t, LONG, calling("{}"), answer_of_tool("21 degrees"), HISTORY[0], LONG),
        lambda t: chat(t, LONG, calling("{}"), answer_of_tool("22 degrees"), HISTORY[0], LONG),
        "messages[3]",
        1,
    ),
    Case(
        "arguments of a call in another order",
        "changed",
        lambda t: chat(t, LONG, calling('{"room": "hall", "on": 1}'), answer_of_tool("done"), HISTORY[0], LONG),
        lambda t: chat(t, LONG, calling('{"on": 1, "room": "hall"}'), answer_of_tool("done"), HISTORY[0], LONG),
        "messages[2]",
    ),
    Case(
        "an answer that came back changed",
        "changed",
        lambda t: chat(t, LONG),
        lambda t: chat(t, LONG, "Well. " + HISTORY[0], LONG),
        "messages[2]",
        0,
        answer=HISTORY[0],
    ),
    Case(
        "an answer that came back without its beginning",
        "changed",
        lambda t: chat(t, LONG),
        lambda t: chat(t, LONG, HISTORY[0][40:], "And?"),
        "messages[2]",
        0,
        answer=HISTORY[0],
    ),
    # Tools, and what else the template shows.
    Case(
        "tools in another order",
        "changed",
        lambda t: chat(t, LONG, tools=[weather(t), lamp(t), music(t)]),
        lambda t: chat(t, LONG, tools=[lamp(t), weather(t), music(t)]),
        "tools[0]",
    ),
    Case(
        "the description of a tool",
        "changed",
        lambda t: chat(t, LONG, tools=[lamp(t), weather(t)]),
        lambda t: chat(t, LONG, tools=[lamp(t), tool("weather", "Now.", city="string", day="string")]),
        "tools[1]",
    ),
    Case(
        "one tool more",
        "changed",
        lambda t: chat(t, LONG, tools=[weather(t)]),
        lambda t: chat(t, LONG, tools=[weather(t), lamp(t)]),
        "tools[1]",
    ),
    Case(
        "one tool less",
        "changed",
        lambda t: chat(t, LONG, tools=[weather(t), lamp(t)]),
        lambda t: chat(t, LONG, tools=[lamp(t)]),
        "tools[0]",
    ),
    Case(
        "members of a tool's schema in another order",
        "changed",
        lambda t: chat(t, LONG, tools=[weather(t)]),
        lambda t: chat(t, LONG, tools=[tool("weather", text(t + "weather", 20), day="string", city="string")]),
        "tools[0]",
    ),
    Case(
        "no tools any more", "changed", lambda t: chat(t, LONG, tools=[weather(t)]), lambda t: chat(t, LONG), "tools[0]"
    ),
    Case(
        "a variable of the template",
        "changed",
        lambda t: chat(t, LONG, chat_template_kwargs={"style": "brief"}),
        lambda t: chat(t, LONG, chat_template_kwargs={"style": "rich"}),
        "chat_template_kwargs",
    ),
    Case(
        "a template that shows the time",
        "template",
        lambda t: chat(t, LONG, chat_template_kwargs={"clock": True}),
        lambda t: chat(t, LONG, chat_template_kwargs={"clock": True}),
        "chat template",
    ),
    Case(
        "a template that leaves out thoughts",
        "template",
        lambda t: chat(t, LONG),
        lambda t: chat(
            t, LONG, {"role": "assistant", "content": HISTORY[0], "reasoning_content": "Let me see."}, "And?"
        ),
        "chat template",
        answer="Let me see. " + HISTORY[0],
    ),
    Case(
        "a template that begins thoughts",
        "template",
        lambda t: chat(t, LONG, chat_template_kwargs={"thoughts": True}),
        lambda t: chat(t, LONG, HISTORY[0], "And?", chat_template_kwargs={"thoughts": True}),
        "chat template",
        answer=HISTORY[0],
    ),
    # Salts.
    Case("another salt", "other_salt", lambda t: chat(t, LONG), lambda t: chat(t, LONG), salts=("s", "t")),
    Case("a salt after none", "other_salt", lambda t: chat(t, LONG), lambda t: chat(t, LONG), salts=(None, "t")),
    Case("no salt after one", "other_salt", lambda t: chat(t, LONG), lambda t: chat(t, LONG), salts=("t", None)),
    # Other routes.
    Case(
        "a prompt of a completion",
        "changed",
        lambda t: completion(t + " one " + LONG),
        lambda t: completion(t + " two " + LONG),
        "prompt",
        path="/v1/completions",
    ),
    Case(
        "a prompt in tokens",
        "changed",
        lambda t: completion([10, 11, 12, *range(20, 80)]),
        lambda t: completion([10, 11, 13, *range(20, 80)]),
        "prompt",
        2,
        path="/v1/completions",
    ),
    Case(
        "a prompt whose beginning is cut off",
        "changed",
        lambda t: completion(t + LONG),
        lambda t: completion(t + LONG, truncate_prompt_tokens=50),
        "prompt",
        path="/v1/completions",
    ),
    Case(
        "TGI's route",
        "changed",
        lambda t: {"inputs": "At 12:30. " + t},
        lambda t: {"inputs": "At 12:31. " + t},
        "inputs",
        7,
        path="/generate",
    ),
    Case(
        "Anthropic's route",
        "changed",
        lambda t: {"system": "At 12:30. " + t, "messages": [{"role": "user", "content": LONG}]},
        lambda t: {"system": "At 12:31. " + t, "messages": [{"role": "user", "content": LONG}]},
        "system",
        7,
        path="/v1/messages",
    ),
    Case(
        "OpenAI's responses",
        "changed",
        lambda t: {"instructions": "At 12:30. " + t, "input": LONG},
        lambda t: {"instructions": "At 12:31. " + t, "input": LONG},
        "instructions",
        7,
        path="/v1/responses",
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    folder = tmp_path_factory.mktemp("router")
    (folder / "template.jinja").write_text(TEMPLATE)
    async with running_router(
        folder, {}, explain_misses="all", tokenizer_config_path=folder / "template.jinja", tool_call_parser="json"
    ) as running:
        yield running


async def ask(router: Router, path: str, body: Body, salt: str | None = None) -> httpx.Response:
    limits = {"max_tokens": 60} if path.startswith("/v1/") else {}
    body = {**limits, **body}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    if salt is not None and path == "/generate":
        body = {**body, "parameters": {"cache_salt": salt}}
    elif salt is not None:
        body["cache_salt"] = salt
    response = await router.post(path, **body)
    assert response.status_code == 200, response.text
    return response


async def explained(
    router: Router, response: httpx.Response, salt: str | None = None, **headers: Any
) -> dict[str, Any]:
    """Returns what /v1/explain says of a request."""
    body = {"request_id": response.headers["x-request-id"], **({} if salt is None else {"cache_salt": salt})}
    answer = await router.http.post("/v1/explain", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


@in_one_loop
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_causes(router: Router, case: Case) -> None:
    router.say(case.answer)
    own = text(case.name)
    await ask(router, case.path, case.first(own), case.salts[0])
    second = await ask(router, case.path, case.second(own), case.salts[1])
    content = await explained(router, second, case.salts[1])
    prefix, found = content["prefix"], content["prefix"]["difference"]
    assert prefix["cause"] == case.cause, content
    assert prefix["missing_tokens"] == content["prompt_tokens"] - content["cached_tokens"] - 1
    assert (found and found["place"]) == case.place, content
    if case.offset is not None:
        assert found["offset"] == case.offset, content
    assert (prefix["movable_tokens"] >= 16) is (case.cause in ("changed", "template")), content


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hybrid(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router of a model with states, whose prompts continue where a snapshot of the state is."""
    folder = tmp_path_factory.mktemp("router")
    async with running_router(folder, {"num_snapshots": 64}, explain_misses="all") as running:
        yield running


@in_one_loop
@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        pytest.param(20, 20, "below_block", id="less than a block"),
        pytest.param(70, 70, "below_block", id="the rest of the last block"),
        pytest.param(64 * 9, 64 * 4 + 40, "no_state", id="a place without a snapshot"),
        pytest.param(64, 64 + 90, "never_seen", id="a text that goes on"),
    ],
)
async def test_causes_of_a_hybrid(hybrid: Router, first: int, second: int, cause: str) -> None:
    ids = [random.Random(f"{first} {second}").randrange(10, 500) for _ in range(1)] + list(range(10, 1000))
    await ask(hybrid, "/v1/completions", completion(ids[:first], max_tokens=1))
    answer = await ask(hybrid, "/v1/completions", completion(ids[:second], max_tokens=1))
    assert (await explained(hybrid, answer))["prefix"]["cause"] == cause


async def test_what_was_evicted_is_not_new(routers: RouterFactory) -> None:
    router = await routers(shard={"num_blocks": 24}, explain_misses="all")
    own = text("evicted", 200)
    await ask(router, "/v1/completions", completion(own, max_tokens=1))
    for number in range(8):
        await ask(router, "/v1/completions", completion(text(number, 100), max_tokens=1))
    answer = await ask(router, "/v1/completions", completion(own + " and now?", max_tokens=1))
    content = await explained(router, answer)
    assert content["prefix"]["cause"] == "evicted"
    assert content["prefix"]["known_tokens"] > content["cached_tokens"] + 100
    assert (
        await router.metric('tgi_prefix_cache_miss_tokens_total{cause="evicted"}')
        == content["prefix"]["missing_tokens"]
    )


async def test_another_adapter(routers: RouterFactory) -> None:
    router = await routers(lora_adapters="chef=/adapters/chef", explain_misses="all")
    body = completion(text("adapter"))
    await ask(router, "/v1/completions", body)
    answer = await ask(router, "/v1/completions", {**body, "model": "chef"}, "s")
    assert (await explained(router, answer, "s"))["prefix"]["cause"] == "other_salt"
    answer = await ask(router, "/v1/completions", {**body, "model": "chef"})
    assert (await explained(router, answer))["prefix"]["cause"] == "other_adapter"


async def test_what_is_shared_is_not_shown(routers: RouterFactory) -> None:
    """Without a salt and a key of one's own, prompts may be those of others."""
    router = await routers()
    own = text("shared", 200)
    await ask(router, "/v1/chat/completions", chat("At 12:30. " + own, LONG))
    answer = await ask(router, "/v1/chat/completions", chat("At 12:31. " + own, LONG, explain_prefix=True))
    shown = answer.json()["usage"]["prompt_tokens_details"]["prefix"]
    assert shown == (await explained(router, answer))["prefix"]
    assert (shown["cause"], shown["difference"], shown["known_tokens"]) == ("changed", None, 0)
    assert shown["movable_tokens"] % 128 == 0
    await ask(router, "/v1/chat/completions", chat(own, LONG), "s")
    answer = await ask(router, "/v1/chat/completions", chat(own, LONG))
    assert (await explained(router, answer))["prefix"]["cause"] == "never_seen"
    answer = await ask(router, "/v1/chat/completions", chat("At 12:39. " + own, LONG), "s")
    for salt in ("t", None):
        request = {"request_id": answer.headers["x-request-id"], **({"cache_salt": salt} if salt else {})}
        assert (await router.post("/v1/explain", **request)).status_code == 404
    assert (await explained(router, answer, "s"))["prefix"]["difference"]["earlier"]


async def test_a_key_learns_nothing_of_others(routers: RouterFactory, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    router = await routers(api_key_file=tmp_path / "keys")
    bodies = [{**chat(f"At 12:3{minute}. " + text("key"), LONG), "max_tokens": 2} for minute in (0, 1)]
    keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
    for body, key in ((bodies[0], keys[0]), (bodies[0], keys[1]), (bodies[1], keys[0])):
        answer = await router.http.post("/v1/chat/completions", json=body, headers=key)
        prefix = (await explained(router, answer, **key))["prefix"]
        shown = prefix["difference"] and prefix["difference"]["earlier"]
        assert (prefix["cause"], bool(shown)) == (("changed", True) if body is bodies[1] else ("never_seen", False))
        other = keys[1] if key is keys[0] else keys[0]
        request = {"request_id": answer.headers["x-request-id"]}
        assert (await router.http.post("/v1/explain", json=request, headers=other)).status_code == 404
        assert (await router.http.post("/v1/explain", json=request)).status_code == 401


async def test_the_log_and_the_usage_have_it(routers: RouterFactory, caplog: pytest.LogCaptureFixture) -> None:
    router, own = await routers(explain_misses="all"), text("usage")
    caplog.set_level("INFO")
    await ask(router, "/v1/chat/completions", chat("At 12:30. " + own, LONG))
    body = chat("At 12:31. " + own, LONG, explain_prefix=True, stream=True, stream_options={"include_usage": True})
    streamed = [json.loads(each) for each in events((await ask(router, "/v1/chat/completions", body)).text)[:-1]]
    found = streamed[-1]["usage"]["prompt_tokens_details"]["prefix"]
    assert (found["cause"], found["difference"]["place"]) == ("changed", "messages[0]")
    record = next(each for each in reversed(caplog.records) if each.message.endswith("answered"))
    assert (record.prefix_miss, record.cached_tokens) == ("changed", found["known_tokens"])  # type: ignore[attr-defined]
    answer = await ask(router, "/v1/completions", completion([text("x"), text("y")], explain_prefix=True))
    assert answer.json()["usage"]["prompt_tokens_details"]["prefix"]["cause"] == "never_seen"
    assert (
        "prefix" not in (await ask(router, "/v1/completions", completion(own))).json()["usage"]["prompt_tokens_details"]
    )


async def test_what_is_forgotten_is_not_explained(routers: RouterFactory) -> None:
    router = await routers()
    answer = await ask(router, "/v1/completions", completion(text("forgotten")), "s")
    await router.post("/v1/forget", cache_salt="s")
    request = {"request_id": answer.headers["x-request-id"], "cache_salt": "s"}
    assert (await router.post("/v1/explain", **request)).status_code == 404
    answer = await ask(router, "/v1/completions", completion(text("forgotten")), "s")
    assert (await explained(router, answer, "s"))["prefix"]["cause"] == "never_seen"


async def test_nothing_is_remembered_if_it_is_off(routers: RouterFactory) -> None:
    router = await routers(explain_misses="off")
    answer = await ask(router, "/v1/completions", completion(text("off"), explain_prefix=True), "s")
    assert "prefix" not in answer.json()["usage"]["prompt_tokens_details"]
    request = {"request_id": answer.headers["x-request-id"], "cache_salt": "s"}
    assert (await router.post("/v1/explain", **request)).status_code == 404


TIME = {"type": "text", "text": "It is 12:31.", "volatile": True}


@in_one_loop
@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (
            [("system", [TIME, *parts("Be brief.")]), ("user", "Hi")],
            "<|system|>Be brief.<|user|>Hi\n\nIt is 12:31.",
        ),
        (
            [("system", parts("Be brief.")), ("user", [TIME, *parts("Hi")]), ("assistant", "Yes?"), ("user", "Bye")],
            "<|system|>Be brief.<|user|>Hi<|assistant|>Yes?<|user|>Bye\n\nIt is 12:31.",
        ),
        ([("system", [*parts("Be brief. "), TIME])], "<|system|>Be brief. \n\nIt is 12:31."),
        ([("user", [TIME]), ("assistant", "Yes?")], "<|user|>It is 12:31.<|assistant|>Yes?"),
    ],
)
async def test_volatile_texts_come_last(router: Router, messages: list[tuple[str, Any]], shown: str) -> None:
    body = {**chat(*messages), "add_generation_prompt": False, "continue_final_message": False}
    response = await router.post("/chat_tokenize", **body)
    assert response.json()["templated_text"] == shown


@in_one_loop
async def test_a_prompt_with_a_volatile_time_is_found(router: Router) -> None:
    own, router.shard.tokens = text("volatile", 120), []
    for minute in (0, 1):
        now = {"role": "system", "content": f"It is 12:3{minute}.", "volatile": True}
        answer = await ask(
            router, "/v1/chat/completions", chat(now, ("system", own), ("user", "Which time is it?")), "v"
        )
    content = await explained(router, answer, "v")
    assert content["cached_tokens"] > 120
    assert content["prefix"]["missing_tokens"] < 20
