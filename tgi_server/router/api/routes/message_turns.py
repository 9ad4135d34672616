"""Messages of Anthropic's interface as turns of a conversation."""

from collections.abc import Iterator

from tgi_server.router.media.images import ImageSource
from tgi_server.router.schemas.message_blocks import (
    Base64Image,
    CompactionBlock,
    ContentSource,
    DocumentBlock,
    ImageBlock,
    PlainTextSource,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UrlImage,
)
from tgi_server.router.schemas.messages import InputTurn
from tgi_server.router.text.conversation import PastCall, Turn


def turns_of(message: InputTurn, path: str) -> list[Turn]:
    """Returns a message as turns: each result of a tool is a turn of its own. path: of the message in the request."""
    turns: list[Turn] = []
    parts: list[str | ImageSource] = []
    calls: list[PastCall] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        own = f"{path}.content[{index}]"
        match block.root:
            case ToolResultBlock(tool_use_id=call_id, content=content):
                results = [
                    part
                    for number, each in enumerate(content)
                    for part in _parts(each.root, f"{own}.content[{number}]")
                ]
                turns.append(Turn("tool", tuple(results), tool_call_id=call_id))
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                calls.append(PastCall(call_id, name, arguments))
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case other:
                parts += _parts(other, own)
    if parts or calls or thoughts or not (turns or message.role == "system"):
        turns.append(Turn(message.role, tuple(parts), "".join(thoughts) or None, tuple(calls)))
    return turns


def _parts(block: object, path: str) -> Iterator[str | ImageSource]:
    """Yields the texts and images that a block shows; nothing for one that says nothing to the model."""
    match block:
        case TextBlock(text=text) | CompactionBlock(content=text) | ToolReference(tool_name=text):
            yield text
        case ImageBlock(source=UrlImage(url=url)):
            yield ImageSource(url, path)
        case ImageBlock(source=Base64Image(media_type=media_type, data=data)):
            yield ImageSource(f"data:{media_type};base64,{data}", path)
        case DocumentBlock(title=title, context=context, source=source):
            yield _heading("document", title, context)
            if isinstance(source, PlainTextSource):
                yield source.data
            elif isinstance(source, ContentSource):
                for index, each in enumerate(source.content):
                    yield from _parts(each.root, f"{path}.source.content[{index}]")
            yield "\n</document>\n"
        case SearchResultBlock(title=title, source=url, content=content):
            yield _heading("search_result", title, url)
            yield from (each.text for each in content)
            yield "\n</search_result>\n"


def _heading(tag: str, *lines: str | None) -> str:
    """Returns the beginning of a document with what is known about it."""
    return "\n".join([f"<{tag}>", *filter(None, lines), ""])
