"""A chat request is planned by its rules, and its prompt is made with its tools or for a text."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.fakes.router_service import RouterService
from tgi_server.contract import GrammarKind
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.routes.chat_prompt import (
    conversation_of,
    prepare_chat,
    render,
    requested_chat,
)
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.conversation import Conversation

TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


def request(**fields: Any) -> ChatRequest:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


async def prepared_for(router: RouterService, asked: ChatRequest) -> tuple[Conversation, PreparedRequest]:
    options = router.service.options.read
    admission = cast(Admission, SimpleNamespace(service=router.service, size=10, owner="", options=options))
    return await prepare_chat(admission, Dialect.CHAT, lambda: requested_chat(admission, asked))


def text_of(router: RouterService, prepared: PreparedRequest) -> str:
    return router.service.text.tokenizer.decode(prepared.input_ids)


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
        await prepared_for(router, request(**fields))


async def test_tools_may_stand_beside_a_wish_for_plain_text(router: RouterService):
    _, prepared = await prepared_for(router, request(tools=TOOLS, response_format={"type": "text"}, n=2))
    assert (prepared.options.n, prepared.logprobs) == (2, None)
    assert "clock" in text_of(router, prepared)


async def test_a_prompt_with_tools_has_the_grammar_of_a_call(router: RouterService):
    _, prepared = await prepared_for(router, request(tools=TOOLS, tool_choice="required", max_tokens=5))
    assert prepared.options.grammar is not None
    assert prepared.options.grammar.type is GrammarKind.JSON_SCHEMA
    assert prepared.options.grammar.frame
    assert "clock" in text_of(router, prepared)
    assert prepared.reader is not None
    assert prepared.options.stopping.max_new_tokens == 5


async def test_a_prompt_for_text_knows_no_tools_and_takes_spans_from_the_messages(router: RouterService):
    schema = {"type": "object", "properties": {"said": {"type": "string", "x-span": True}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    asked = request(tools=TOOLS, tool_choice="none", response_format=form, max_completion_tokens=7)
    _, prepared = await prepared_for(router, asked)
    assert "clock" not in text_of(router, prepared)
    assert prepared.reader is None
    assert prepared.options.grammar is not None
    assert prepared.options.grammar.text == "Be brief.\nhello"
    assert prepared.options.stopping.max_new_tokens == 7


def test_a_message_of_the_assistant_at_the_end_is_left_open(router: RouterService):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "he"}]
    asked = ChatRequest.model_validate({"model": "m", "messages": messages})
    prompt = render(router.service, conversation_of(asked))
    assert prompt.text.endswith("assistant: he")
