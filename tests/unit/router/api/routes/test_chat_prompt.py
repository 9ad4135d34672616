"""A chat request is planned by its rules, and its prompt is made with its tools or for a text."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.fakes.router_service import RouterService
from tgi_server.contract import GrammarKind
from tgi_server.router.api.exchange import Exchange
from tgi_server.router.api.routes.chat_prompt import (
    ChatPrompt,
    conversation_of,
    plan_chat,
    prompt_for_chat,
    render,
    tools_of,
)
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.chat import ChatRequest

TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


def request(**fields: Any) -> ChatRequest:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


async def prompt_for(router: RouterService, asked: ChatRequest) -> ChatPrompt:
    exchange = cast(Exchange, SimpleNamespace(service=router.service, size=10, request=None, owner=""))
    return await prompt_for_chat(exchange, lambda: plan_chat(router.service, asked))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n": 9}, "`n` is 9; it must be 1 to 8"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
        ({"tools": TOOLS, "tool_choice": "other"}, "'other'"),
    ],
)
async def test_a_request_that_breaks_a_rule_is_refused(router: RouterService, fields: dict[str, Any], told: str):
    with pytest.raises(InvalidRequest, match=told):
        await prompt_for(router, request(**fields))


async def test_tools_may_stand_beside_a_wish_for_plain_text(router: RouterService):
    prompt = await prompt_for(router, request(tools=TOOLS, response_format={"type": "text"}, n=2))
    assert (prompt.checked.options.n, prompt.logprobs) == (2, None)
    assert "clock" in prompt.text


async def test_a_prompt_with_tools_has_the_grammar_of_a_call(router: RouterService):
    prompt = await prompt_for(router, request(tools=TOOLS, tool_choice="required", max_tokens=5))
    assert prompt.checked.options.grammar is not None
    assert prompt.checked.options.grammar.type is GrammarKind.JSON_SCHEMA
    assert prompt.checked.options.grammar.frame
    assert "clock" in prompt.text
    assert prompt.reader is not None
    assert prompt.checked.options.stopping.max_new_tokens == 5


async def test_a_prompt_for_text_knows_no_tools_and_takes_spans_from_the_messages(router: RouterService):
    schema = {"type": "object", "properties": {"said": {"type": "string", "x-span": True}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    asked = request(tools=TOOLS, tool_choice="none", response_format=form, max_completion_tokens=7)
    prompt = await prompt_for(router, asked)
    assert "clock" not in prompt.text
    assert prompt.reader is None
    assert prompt.checked.options.grammar is not None
    assert prompt.checked.options.grammar.text == "Be brief.\nhello"
    assert prompt.checked.options.stopping.max_new_tokens == 7


def test_a_message_of_the_assistant_at_the_end_is_left_open(router: RouterService):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "he"}]
    asked = ChatRequest.model_validate({"model": "m", "messages": messages})
    prompt = render(router.service, conversation_of(asked, tools_of(asked)))
    assert prompt.text.endswith("assistant: he")
