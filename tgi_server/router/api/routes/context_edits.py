"""Context editing of Anthropic's API: removes thoughts and results of tools from the prompt of a conversation."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tgi_server.router.api.routes.chat_prompt import render
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.context_management import (
    AppliedEdits,
    ClearedThinking,
    ClearedToolUses,
    ClearThinking,
    ClearToolUses,
    Compact,
    ContextManagement,
    Edit,
    EditThreshold,
)
from tgi_server.router.service import Service
from tgi_server.router.text.conversation import Conversation, PastCall, Turn

_CLEARED = "(This result was cleared to save context.)"


class ContextEdits:
    """Applies the edits of one request.

    report: the edits that changed the conversation; None: none were requested. saved_tokens: number of tokens by which
    the prompt became shorter.
    """

    def __init__(self, service: Service, management: ContextManagement | None) -> None:
        self._service = service
        self._edits = () if management is None else management.edits
        self.report = None if management is None else AppliedEdits(applied_edits=[])
        self.saved_tokens = 0

    def apply(self, conversation: Conversation) -> Conversation:
        """Returns the edited conversation. Takes time in proportion to its size. Raises InvalidRequest."""
        for edit in self._edits:
            conversation = self._applied(edit, conversation)
        return conversation

    def _applied(self, edit: Edit, conversation: Conversation) -> Conversation:
        match edit:
            case ClearThinking():
                turns, cleared = _without_thoughts(conversation.turns, edit.keep)
                if not cleared:
                    return conversation
                edited, saved = self._edited(conversation, turns)
                self._note(ClearedThinking(cleared_input_tokens=saved, cleared_thinking_turns=cleared))
                return edited
            case ClearToolUses():
                return self._without_results(edit, conversation)
            case Compact(trigger=trigger):
                # Longer prompts than the server accepts are refused for that reason.
                if trigger.value < self._service.limits.max_input_tokens:
                    tokens = self._tokens(conversation)
                    if tokens > trigger.value:
                        raise InvalidRequest(
                            f"the edit `{edit.type}` of `context_management` is not supported here, and the prompt of "
                            f"{tokens} tokens is above its trigger of {trigger.value}; send a shorter conversation",
                            param="context_management",
                        )
                return conversation

    def _without_results(self, edit: ClearToolUses, conversation: Conversation) -> Conversation:
        uses = [call for turn in conversation.turns for call in turn.calls]
        old = uses[: max(len(uses) - edit.keep.value, 0)]
        cleared = {call.id for call in old if call.name not in edit.exclude_tools}
        above = len(uses) > edit.trigger.value if edit.trigger.type == "tool_uses" else None
        if not cleared or above is False:
            return conversation
        if above is None and self._tokens(conversation) <= edit.trigger.value:
            return conversation
        turns = [_cleared(turn, cleared, edit.clear_tool_inputs) for turn in conversation.turns]
        edited, saved = self._edited(conversation, turns)
        if edit.clear_at_least is not None and saved < edit.clear_at_least.value:
            return conversation
        self._note(ClearedToolUses(cleared_input_tokens=saved, cleared_tool_uses=len(cleared)))
        return edited

    def _edited(self, conversation: Conversation, turns: Sequence[Turn]) -> tuple[Conversation, int]:
        """Replaces the turns. Returns the conversation, and the number of tokens by which its prompt is shorter."""
        edited = replace(conversation, turns=turns)
        return edited, max(self._tokens(conversation) - self._tokens(edited), 0)

    def _note(self, edit: ClearedThinking | ClearedToolUses) -> None:
        assert self.report is not None
        self.report.applied_edits.append(edit)
        self.saved_tokens += edit.cleared_input_tokens

    def _tokens(self, conversation: Conversation) -> int:
        """Returns the number of tokens of the prompt, with a placeholder for each image."""
        text = render(self._service, conversation).text
        return len(self._service.text.tokenizer.encode(text, add_special_tokens=False, offsets=False).ids)


def _without_thoughts(turns: Sequence[Turn], keep: object) -> tuple[list[Turn], int]:
    """Returns the turns with the thoughts of the last ones only, and the number of turns that lose theirs.

    A turn of the assistant is all that it says until the user speaks again: calls of tools do not end it.
    """
    if not isinstance(keep, EditThreshold):
        return list(turns), 0
    spoken = 0
    turn_of: list[int] = []
    for turn in turns:
        spoken += turn.role == "user"
        turn_of.append(spoken)
    thinking = sorted({number for turn, number in zip(turns, turn_of, strict=True) if turn.reasoning is not None})
    cleared = set(thinking[: max(len(thinking) - keep.value, 0)])
    shown = [
        replace(turn, reasoning=None) if number in cleared else turn
        for turn, number in zip(turns, turn_of, strict=True)
    ]
    return shown, len(cleared)


def _cleared(turn: Turn, calls: Collection[str], inputs: bool | Collection[str]) -> Turn:
    """Returns a turn without the results of `calls`. inputs: True, or names of tools: removes arguments as well."""
    if turn.tool_call_id in calls:
        return replace(turn, parts=(_CLEARED,))
    if inputs is False or not turn.calls:
        return turn
    return replace(turn, calls=tuple(_without_input(call, calls, inputs) for call in turn.calls))


def _without_input(call: PastCall, calls: Collection[str], inputs: bool | Collection[str]) -> PastCall:
    named = inputs is True or (not isinstance(inputs, bool) and call.name in inputs)
    return replace(call, arguments={}) if named and call.id in calls else call
