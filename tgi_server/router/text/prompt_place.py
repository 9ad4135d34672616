"""Finds the place in a request at which its prompt begins to differ from an earlier one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from msgspec import json

from tgi_server.router.prompt_source import KnownPrompt, PromptPart, PromptSource
from tgi_server.router.text.conversation import Conversation, Turn
from tgi_server.router.text.tokenizer import TextTokenizer

_WIDTH = 4  # bytes of a token
# Characters that are shown before and after a difference; tokens, if the text of a prompt is not known.
_BEFORE, _AFTER, _TOKENS = 32, 24, 8
_FIRST_IMAGE_KEY = 2**31
# The text of a part is searched for in the prompt by this many first characters, at most this many times.
_HEAD, _TRIES = 64, 8
# After this many parts that were not found, as the template renders them differently, no more are searched for.
_MOST_CHANGED = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two prompts.

    place: a field of the request, such as `messages[2]`. offset: the character in the text of that field; None: not in
    a text. before, here: the characters before and after the difference. earlier: the characters of the earlier
    prompt after it. by_template: True if the requests have the same texts up to there.
    """

    place: str
    offset: int | None = None
    before: str = ""
    here: str = ""
    earlier: str = ""
    by_template: bool = False


def conversation_source(conversation: Conversation) -> PromptSource:
    """Returns the source of a conversation's prompt, without the text of the prompt."""
    parts = [part for index, turn in enumerate(conversation.turns) for part in _parts(turn, f"messages[{index}]")]
    return PromptSource(
        parts=parts,
        images=[image.place for image in conversation.images],
        tools=[json.encode(tool) for tool in conversation.use.shown],
        settings=json.encode((conversation.variables, conversation.tool_prompt)),
    )


def _parts(turn: Turn, place: str) -> Iterator[PromptPart]:
    """Yields the texts of a turn. place: its field in the request, if the turn has none itself."""
    place = turn.place or place
    beside = json.encode((turn.calls, turn.name, turn.reasoning)) if turn.calls or turn.name or turn.reasoning else b""
    texts = [(index, part) for index, part in enumerate(turn.parts) if isinstance(part, str)]
    for index, text in texts or [(0, "")]:
        where = place if len(turn.parts) < 2 else f"{place}.content[{index}]"
        yield PromptPart(where, turn.role, text, beside, bool(turn.reasoning))


def difference(source: PromptSource, other: KnownPrompt, parted: int, tokenizer: TextTokenizer) -> Difference:
    """Returns the first difference of a prompt to an earlier one. parted: number of tokens before it."""
    assert source.lookup is not None
    text, known = source.text, other.source.text
    if text is None or known is None:
        tokens, following = source.lookup.tokens, (parted, parted + _TOKENS)
        before = _decoded(tokenizer, tokens, (max(parted - _TOKENS, 0), parted))
        here, earlier = _decoded(tokenizer, tokens, following), _decoded(tokenizer, other.tokens, following)
        return Difference("prompt", None, before, here, earlier)
    at = _common(text, known)
    if at == len(known):
        known += _decoded(tokenizer, other.tokens, (other.prompt_tokens, len(other.tokens) // _WIDTH))
        at = _common(text, known)
    place, offset = _place(source, other.source, text, at)
    return Difference(
        place or "chat template",
        offset if place else at,
        text[max(at - _BEFORE, 0) : at],
        text[at : at + _AFTER],
        known[at : at + _AFTER],
        by_template=not place,
    )


def _place(source: PromptSource, other: PromptSource, text: str, at: int) -> tuple[str, int | None]:
    """Returns the place in the request, and the offset in the text there; no place if only the template differs.

    at: index of the differing character in the prompt.
    """
    parts = source.parts
    changed = next((index for index, pair in enumerate(zip_longest(parts, other.parts)) if _differ(*pair)), None)
    following = 0
    for index, (start, end, skipped) in enumerate(_spans(text, parts, at)):
        if start <= at <= end and index < len(parts) and _differ(parts[index], _get(other.parts, index)):
            if at == start and parts[index].role == "assistant" and _left_out(source, other, index, at):
                return "", None
            if at < end or changed == index:
                return parts[index].place, at - start + skipped
        if 0 <= end <= at:
            following = index + 1
    if changed is not None and changed <= following < len(parts):
        return parts[changed].place, None
    if source.tools != other.tools:
        tools = enumerate(zip_longest(source.tools, other.tools))
        return f"tools[{next(index for index, (tool, earlier) in tools if tool != earlier)}]", None
    if source.settings != other.settings:
        return "chat_template_kwargs", None
    if changed is not None and changed <= following:
        return "end of the messages", None
    return "", None


def _left_out(source: PromptSource, other: PromptSource, index: int, at: int) -> bool:
    """Returns True if the template omits something before an answer, such as thoughts, in later prompts."""
    answered = index == len(other.parts)
    return answered and (source.parts[index].thoughts or at < len(other.text or ""))


def _get(parts: Sequence[PromptPart], index: int) -> PromptPart | None:
    return parts[index] if index < len(parts) else None


def _differ(part: PromptPart | None, other: PromptPart | None) -> bool:
    """Returns True unless two parts have the same content. Their places may differ."""
    if part is None or other is None:
        return True
    return (part.role, part.text, part.beside) != (other.role, other.text, other.beside)


def _spans(text: str, parts: Sequence[PromptPart], most: int) -> Iterator[tuple[int, int, int]]:
    """Yields the span of each part in the prompt: start, end, and how many blanks of the part precede the start.

    The span is (-1, -1, 0) for a part that is not found. most: parts after this character are not searched for.
    """
    end = changed = 0
    for part in parts:
        shown = part.text.strip()
        start = _found(text, shown, end) if shown and end <= most and changed < _MOST_CHANGED else -1
        if start < 0:
            changed += 1
            yield -1, -1, 0
            continue
        end = start + len(shown)
        yield start, end, len(part.text) - len(part.text.lstrip())


def _found(text: str, shown: str, start: int) -> int:
    """Returns the index of a text at or after `start`; -1 if it is not found within _TRIES tries."""
    head = shown[:_HEAD]
    for _ in range(_TRIES):
        start = text.find(head, start)
        if start < 0 or text.startswith(shown, start):
            return start
        start += 1
    return -1


def _common(text: str, other: str) -> int:
    """Returns the length of the common prefix of two texts, in characters."""
    low, high = 0, min(len(text), len(other))
    if text.startswith(other[:high]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _decoded(tokenizer: TextTokenizer, tokens: bytes, span: tuple[int, int]) -> str:
    """Returns the text of a span of tokens, without images."""
    ids = memoryview(tokens).cast("I")[span[0] : span[1]]
    return tokenizer.decode([token for token in ids if token < _FIRST_IMAGE_KEY])
