"""The edits of a conversation that /v1/messages makes before the model reads it, and the report of them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tgi_server.router.schemas.base import Items, Name, RequestModel, ResponseModel, UnsignedInt, one_of
from tgi_server.router.schemas.validation import BY_TYPE


class EditThreshold(RequestModel):
    """A number of tokens of the prompt, of calls of tools, or of turns with thoughts."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: UnsignedInt


class AllTurns(RequestModel):
    type: Literal["all"]


class ClearThinking(RequestModel):
    """Leaves out the thoughts of earlier turns. keep: number of last turns that keep theirs."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Literal["all"] | AllTurns | EditThreshold, BY_TYPE] = EditThreshold(type="thinking_turns", value=1)


class ClearToolUses(RequestModel):
    """Replaces results of earlier calls, once the prompt or the number of calls is above `trigger`.

    keep: number of last calls that keep theirs. clear_at_least: otherwise nothing is replaced. clear_tool_inputs: also
    the arguments of the calls, of all tools or of those named.
    """

    type: Literal["clear_tool_uses_20250919"]
    trigger: EditThreshold = EditThreshold(type="input_tokens", value=100_000)
    keep: EditThreshold = EditThreshold(type="tool_uses", value=3)
    clear_at_least: EditThreshold | None = None
    clear_tool_inputs: Annotated[bool | Items[Name], BY_TYPE] = False
    exclude_tools: Items[Name] = Field(default=[])


class Compact(RequestModel):
    """Would have the conversation summarized; a prompt that reaches `trigger` is refused."""

    harmless: ClassVar[frozenset[str]] = frozenset({"instructions", "pause_after_compaction"})

    type: Literal["compact_20260112"]
    trigger: EditThreshold = EditThreshold(type="input_tokens", value=150_000)


Edit = Annotated[ClearThinking | ClearToolUses | Compact, BY_TYPE]


class ContextManagement(RequestModel):
    edits: Items[Edit] = Field(default=[])


class ClearedThinking(ResponseModel, kw_only=True):
    type: Literal["clear_thinking_20251015"] = "clear_thinking_20251015"
    cleared_input_tokens: int
    cleared_thinking_turns: int


class ClearedToolUses(ResponseModel, kw_only=True):
    type: Literal["clear_tool_uses_20250919"] = "clear_tool_uses_20250919"
    cleared_input_tokens: int
    cleared_tool_uses: int


class AppliedEdits(ResponseModel, kw_only=True):
    """The edits that changed the conversation."""

    applied_edits: list[Annotated[Any, one_of(ClearedThinking, ClearedToolUses)]]


class OriginalTokens(ResponseModel, kw_only=True):
    original_input_tokens: int
