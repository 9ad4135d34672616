"""Answers of models as they are published: their marks are followed by grammars, and understood by the router.

The router and the grammar are real; the answer is decided by the test, in the tokens in which the model would write it.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.grammars import following_fault
from tests.integration.router.conftest import Router, events, running_router
from tests.published_tokenizers import PUBLISHED, Published
from tgi_server.grammar import GrammarCompiler
from tgi_server.router.answers.formats import NUMBER, tool_format
from tgi_server.router.answers.reasoning import reasoning_tags
from tgi_server.wire import grammar_from_message

# The last one's calls are in a form that only a flag names.
MODELS = {**PUBLISHED, "json": replace(PUBLISHED["llama3.1"], calls="json")}
QUICK = ("qwen3", "deepseek_r1", "gemma3", "llama3.1")
HELLO = [{"role": "user", "content": "What of Paris?"}]
PARIS, ROME = {"place": "Paris"}, {"place": 'R "o" {me}'}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tells the {name}.", "parameters": SCHEMA}}
    for name in ("weather", "clock")
]
NAMED = {"type": "function", "function": {"name": "clock"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
THOUGHTS = "Hm, {or} not\nmuch."


class Model:
    """A published model in a router, whose answers the test decides."""

    def __init__(self, published: Published, folder: Path, router: Router) -> None:
        self.published = published
        self._router = router
        self.form = tool_format(published.calls, "")
        self._tags = reasoning_tags("auto", published.template)
        self._compiler = GrammarCompiler(folder, published.vocab_size, published.end_ids)
        begins = "<think>" in published.template.rpartition("add_generation_prompt")[2]
        switches = ("enable_thinking", "thinking is defined")
        self.opened = begins and not any(switch in published.template for switch in switches)

    @property
    def thought_marks(self) -> tuple[str, ...]:
        """The texts around thoughts."""
        return () if self._tags is None else (self._tags.begin, self._tags.end)

    def thought(self) -> str:
        """Thoughts as the model writes them; empty where it has none."""
        if self._tags is None:
            return ""
        if self._tags.opening:
            return f"{self._tags.begin}{THOUGHTS}{self._tags.end}"
        begin = "" if self.opened else f"{self._tags.begin}\n"
        return f"{begin}{THOUGHTS}{self._tags.end}\n\n"

    def said(self, text: str) -> str:
        """Returns a text as the model writes it after its reasoning, or without reasoning."""
        return (self._tags.opening if self._tags is not None else "") + text

    def call(self, *calls: tuple[str, dict[str, str]]) -> str:
        """Calls of tools as the model writes them."""
        form, written = self.form, self.form.trigger
        for index, (name, arguments) in enumerate(calls):
            head = form.separator + form.call_head(name) if index else form.first_head(name)
            written += head.replace(NUMBER, str(index))
            tags = form.tags
            if tags is None:
                written += json.dumps(arguments, ensure_ascii=False) + form.tail
            else:
                texts = {key: value if tags.end else json.dumps(value) for key, value in arguments.items()}
                told = (tags.tag(key, text=True) + tags.quote + value + tags.end for key, value in texts.items())
                written += tags.separator.join(told) + form.tail
        return written + form.end

    async def answers(self, text: str, **body: Any) -> dict[str, Any]:
        """Has the model answer with a text, which the request's grammar must allow token by token."""
        # Behind another token, a text has no blank put in front of it.
        tokens = self.published.tokenizer.encode(self.published.eos + text, add_special_tokens=False).ids[1:]
        self._router.shard.tokens = [*tokens, self.published.end]
        response = await self._router.post("/v1/chat/completions", messages=HELLO, **body)
        assert response.status_code == 200, response.text
        received = self._router.shard.received[-1]
        if received.HasField("grammar"):
            grammar = grammar_from_message(received.grammar)
            assert following_fault(self._compiler, grammar, [*tokens, self.published.end]) is None
        (choice,) = response.json()["choices"]
        message = choice["message"]
        calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        whole = {"thoughts": message.get("reasoning_content"), "text": message["content"], "calls": calls}
        assert await self._streamed(**body) == whole
        return whole | {"calls": [(name, json.loads(arguments)) for name, arguments in calls]}

    async def _streamed(self, **body: Any) -> dict[str, Any]:
        """Has the model answer the same as a stream, and puts that together."""
        response = await self._router.post("/v1/chat/completions", messages=HELLO, stream=True, **body)
        chunks = [json.loads(each) for each in events(response.text) if each != "[DONE]"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls: list[list[str]] = []
        for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        thoughts, text = (
            "".join(delta.get(key) or "" for delta in deltas) or None for key in ("reasoning_content", "content")
        )
        return {"thoughts": thoughts, "text": text, "calls": [(name, arguments) for name, arguments in calls]}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(each, id=name, marks=[] if name in QUICK else [pytest.mark.slow]) for name, each in MODELS.items()
    ],
)
async def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    folder = request.param.save(tmp_path_factory.mktemp("model"))
    shard = {"end": request.param.end, "vocab_size": request.param.vocab_size}
    settings = {"tokenizer_name": folder, "tool_call_parser": "json" if request.param.calls == "json" else "auto"}
    async with running_router(tmp_path_factory.mktemp("router"), shard, **settings) as router:
        yield Model(request.param, folder, router)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def answer(model: Model, text: str | None, *calls: tuple[str, dict[str, str]], thinks: bool = True) -> dict[str, Any]:
    thoughts = THOUGHTS if thinks and model.published.thinks else None
    return {"thoughts": thoughts, "text": text, "calls": list(calls)}


async def test_a_call_that_is_required(model: Model):
    called = ("weather", PARIS)
    written = model.thought() + model.call(called)
    assert await model.answers(written, tools=TOOLS, tool_choice="required") == answer(model, None, called)


async def test_a_call_of_a_named_tool(model: Model):
    called = ("clock", ROME)
    written = model.thought() + model.call(called)
    assert await model.answers(written, tools=TOOLS, tool_choice=NAMED) == answer(model, None, called)


async def test_calls_that_the_model_chose(model: Model):
    one, other = ("weather", PARIS), ("clock", ROME)
    called = [one] if model.form.alone else [one, other]
    written = model.thought() + model.call(*called)
    assert await model.answers(written, tools=TOOLS) == answer(model, None, *called)
    if model.form.anywhere and not model.said(""):
        written = f"{model.thought()}I look it up.\n\n{model.call(*called)}"
        assert await model.answers(written, tools=TOOLS) == answer(model, "I look it up.", *called)


async def test_a_text_that_begins_like_a_mark(model: Model):
    before = model.thought() if model.opened else ""
    text = "<div> {or} [INST"
    assert await model.answers(before + model.said(text), tools=TOOLS) == answer(model, text, thinks=model.opened)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "{ not json",
        '{"a": 1}',
        '\n{"name": 3}',
        '{"parameters": {}, "name": "weather"}',
        '{"type": "function"}',
    ],
)
async def test_a_text_that_begins_with_a_brace(model: Model, text: str):
    before = model.thought().rstrip("\n") if text.startswith("\n") else model.thought()
    assert await model.answers(before + model.said(text), tools=TOOLS) == answer(
        model, text.lstrip("\n") if model.published.thinks else text
    )


async def test_a_text_that_looks_like_a_call(model: Model):
    """It names none of the tools, or another member is the first."""
    if model.form.anywhere:
        pytest.skip("a mark shows its calls")
    call = model.call(("weather", PARIS))
    for text in (call.replace("weather", "weathers"), call.replace("weather", "wea"), call.replace('name"', 'named"')):
        assert await model.answers(text, tools=TOOLS) == answer(model, text)
    assert await model.answers(call[: call.index("her")], tools=TOOLS) == answer(model, call[: call.index("her")])
    for unnamed in (None, {"type": "json_object"}):
        text = json.dumps({"name": "Bob", "function": {"_name": "Bob"}})
        assert await model.answers(text, tools=TOOLS, response_format=unnamed) == answer(model, text)


async def test_calls_in_other_layouts(model: Model):
    if model.form.anywhere:
        pytest.skip("behind a mark, calls are in one layout")
    called = ("weather", PARIS)
    head, rest = model.call(called).split('"weather"')
    for layout in (head.replace(" ", ""), head.replace("{", "{\n    "), "\n\n" + head):
        assert await model.answers(f'{layout}"weather"{rest}', tools=TOOLS) == answer(model, None, called)
    if model.form.triggers:
        written = f'{model.form.triggers[0]}"weather"{rest}'
        assert await model.answers(written, tools=TOOLS) == answer(model, None, called)


async def test_thoughts_behind_a_blank(model: Model):
    if model.opened or not model.published.thinks:
        pytest.skip("it does not begin its thoughts itself")
    called = ("weather", PARIS)
    for text in (None, "I look it up."):
        if text and model.said(""):
            continue  # an answer is either a text or a call
        blank = "" if model.said("") else "\n"
        written = f"\n{model.thought()}{text or ''}{blank}{model.call(called)}"
        assert await model.answers(written, tools=TOOLS) == answer(model, text, called)


async def test_a_text_beside_tools(model: Model):
    marks = (model.form.trigger, *model.thought_marks)
    text = f"It is {' '.join(each for each in model.published.texts if each not in marks)}, {{or}} I think."
    assert await model.answers(model.thought() + model.said(text), tools=TOOLS) == answer(model, text)


async def test_thoughts_before_json(model: Model):
    written = json.dumps(ROME)
    assert await model.answers(model.thought() + model.said(written), response_format=FORMAT) == answer(model, written)


async def test_thoughts_that_a_variable_turns_on(model: Model):
    """They begin in the prompt, or the prompt says that there may be some. Their number is bounded."""
    if model.published.name not in ("deepseek_v3.1", "deepseek_v3.2", "granite3.3"):
        pytest.skip("its template has no such variable")
    on: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}, "thinking_token_budget": 7}
    begins = "'<think>' if thinking" in model.published.template
    thought = (THOUGHTS + "</think>") if begins else f"<think>{THOUGHTS}</think>"
    around = ("<response>", "</response>") if "</response>" in model.published.template else ("", "")
    called, written = ("weather", PARIS), json.dumps(ROME)
    for begin, end in {around, ("", "")}:
        text = f"{thought}\n{begin}It rains.{end}"
        assert await model.answers(text, **on) == answer(model, "It rains.")
        assert await model.answers(text, tools=TOOLS, **on) == answer(model, "It rains.")
        budget = model._router.shard.received[-1].thought_budget
        assert (budget.tokens, budget.open, budget.end) == (7, begins, "</think>")
        text = f"{thought}\n{begin}{written}{end}"
        assert await model.answers(text, response_format=FORMAT, **on) == answer(model, written)
    text = f"{thought}\n{model.call(called)}"
    assert await model.answers(text, tools=TOOLS, **on) == answer(model, None, called)
    assert await model.answers(text, tools=TOOLS, tool_choice="required", **on) == answer(model, None, called)


async def test_added_tokens_within_json(model: Model):
    added = "".join(f"{each} a" for each in model.published.texts)
    written = json.dumps({"place": f"it is {added}"}, ensure_ascii=False)
    assert await model.answers(model.thought() + model.said(written), response_format=FORMAT) == answer(model, written)
    if model.form.tags is not None and model.form.tags.end:  # which no text has
        written = written.replace(model.form.tags.end, "")
    called = ("weather", json.loads(written))
    written = model.thought() + model.call(called)
    assert await model.answers(written, tools=TOOLS, tool_choice="required") == answer(model, None, called)


SAID = "a true größe 🌳 the"
CHOSEN, LESS, LEAST = -0.25, -1.5, -3.0


async def test_alternatives_have_their_own_texts_and_bytes(model: Model, monkeypatch: pytest.MonkeyPatch):
    """On all routes. Two alternatives differ by the space in front only; characters of several bytes are in parts."""
    published, shard = model.published, model._router.shard
    space = "\u2581" if published.sentence_piece else "\u0120"
    others = [published.token_id(space + "the"), published.token_id("the")]
    following = shard._next

    def with_alternatives(row: Any) -> Any:
        generation = following(row)
        chosen = generation.token_ids[0]
        tops = {**dict(zip(others, (LESS, LEAST), strict=True)), chosen: CHOSEN}
        pairs = sorted(tops.items(), key=lambda each: -each[1])
        del generation.top_tokens[:], generation.logprobs[:]
        generation.top_tokens.add(ids=[token for token, _ in pairs], logprobs=[value for _, value in pairs])
        generation.logprobs.append(CHOSEN)
        return generation

    monkeypatch.setattr(shard, "_next", with_alternatives)
    tokens = published.tokenizer.encode(published.eos + SAID, add_special_tokens=False).ids[1:]
    shard.tokens = [*tokens, published.end]

    async def ask(route: str, **body: Any) -> dict[str, Any]:
        response = await model._router.post(route, **body)
        assert response.status_code == 200, response.text
        answered: dict[str, Any] = response.json()
        return answered

    parameters = {"details": True, "top_n_tokens": 3, "max_new_tokens": 99}
    details = (await ask("/generate", inputs="t", parameters=parameters))["details"]
    assert "".join(each["text"] for each in details["tokens"] if not each["special"]) == SAID
    for chosen, tops in zip(details["tokens"], details["top_tokens"], strict=True):
        assert chosen["id"] in [each["id"] for each in tops]
        texts = {each["id"]: each["text"] for each in tops}
        assert [texts[each] for each in others] == [" the", "the"]

    (choice,) = (await ask("/v1/completions", prompt="t", logprobs=3, max_tokens=99))["choices"]
    told = choice["logprobs"]
    assert choice["text"] == SAID
    for name, tops in zip(told["tokens"], told["top_logprobs"], strict=True):
        assert tops == {"the": LEAST} | {" the": LESS} | {name: CHOSEN}

    (choice,) = (await ask("/v1/chat/completions", messages=HELLO, logprobs=True, top_logprobs=3))["choices"]
    include = ["message.output_text.logprobs"]
    output = (await ask("/v1/responses", input="t", include=include, top_logprobs=3))["output"]
    in_chat = choice["logprobs"]["content"]
    in_response = [each for item in output for part in item["content"] for each in part.get("logprobs", ())]
    for entries in (in_chat, in_response if not published.thinks else in_chat):
        *spoken, end = entries
        assert end["token"] == published.tokenizer.id_to_token(published.end)
        assert bytes(byte for each in spoken for byte in each["bytes"]).decode() == SAID
        for entry in entries:
            tops = {each["token"]: (each["logprob"], bytes(each["bytes"])) for each in entry["top_logprobs"]}
            alternatives = {" the": (LESS, b" the"), "the": (LEAST, b"the")}
            assert tops == alternatives | {entry["token"]: (CHOSEN, bytes(entry["bytes"]))}
