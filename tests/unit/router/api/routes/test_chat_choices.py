"""A choice is a call of a tool or a text: the name decides, and the call is written as it comes."""

from types import SimpleNamespace
from typing import Any

import pytest

from tgi_server.contract import FinishReason
from tgi_server.router.api.routes.chat_choices import ToolCallFormatter, tool_finish_reason
from tgi_server.router.errors import GenerationFailed, InvalidTool


class Call:
    """A formatter of a call, the pieces that it wrote, and the ends that it told."""

    def __init__(self) -> None:
        self.written: list[tuple[str | None, str, str | None]] = []
        self.ends: list[Any] = []
        self.formatter = ToolCallFormatter(
            self.ends.append, lambda _, name, arguments, reason: self.written.append((name, arguments, reason))
        )

    def feed(self, *pieces: str, reason: FinishReason | None = None) -> None:
        """Feeds pieces of the text; the last one has the finish reason."""
        for position, piece in enumerate(pieces):
            last = reason if position == len(pieces) - 1 else None
            self.formatter.rest(SimpleNamespace(finish_reason=last), piece)  # type: ignore[arg-type]


async def test_a_call_is_written_from_the_piece_that_completes_its_name():
    call = Call()
    call.feed('{"function": {"_na', 'me": "clo')
    assert not call.formatter.named.done()
    call.feed('ck", "zone": ', '"UTC"', "}}", reason=FinishReason.EOS_TOKEN)
    assert call.formatter.named.result() == "clock"
    names = [name for name, _, _ in call.written]
    assert names == ["clock"] + [None] * (len(names) - 1)
    assert "".join(arguments for _, arguments, _ in call.written) == '{"zone": "UTC"}'
    assert [reason for _, _, reason in call.written][-1] == "tool_calls"
    call.formatter.ended(None)
    assert call.ends == [None]


async def test_an_answer_that_calls_no_tool_writes_nothing_and_tells_no_end():
    call = Call()
    call.feed('{"function": {"_name": "no_tool", "content": ""}}', reason=FinishReason.EOS_TOKEN)
    call.formatter.ended(None)
    assert call.formatter.named.result() == "no_tool"
    assert (call.written, call.ends) == ([], [])


async def test_an_answer_that_ends_before_the_name_says_what_may_help():
    call = Call()
    call.feed('{"function": {"_na', reason=FinishReason.LENGTH)
    call.formatter.ended(None)
    with pytest.raises(InvalidTool, match="more `max_tokens` may help"):
        call.formatter.named.result()
    assert call.ends == []


async def test_a_failure_reaches_whoever_waits_for_the_name_or_for_the_end():
    error, early, late = GenerationFailed("no"), Call(), Call()
    early.formatter.ended(error)
    assert early.formatter.named.exception() is error
    late.feed('{"function": {"_name": "clock", ', '"zone": ')
    late.formatter.ended(error)
    assert late.ends == [error]


def test_a_call_that_was_cut_off_is_not_whole():
    assert tool_finish_reason(FinishReason.LENGTH) == "length"
    assert tool_finish_reason(FinishReason.STOP_SEQUENCE) == "tool_calls"
