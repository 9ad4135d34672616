"""Reads the call of a tool out of a generated text, while it is being generated."""

import json
import re

from tgi_server.router.errors import InvalidTool

_HEAD = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:(\})|,\s*(?=\S))')
# JSON's white space.
_BLANK = " \t\n\r"


class ToolCallReader:
    """Takes `{"function": {"_name": NAME, ...}}` piece by piece; gives the name, then the arguments as JSON text.

    The arguments are what remains of the inner object without its `_name`.
    """

    def __init__(self) -> None:
        self._text = ""
        self._tail = ""
        self._complete = False
        self.name: str | None = None

    def feed(self, text: str) -> str:
        """Returns the next piece of the arguments."""
        if self._complete:
            return ""
        if self.name is None:
            self._text += text
            if not text.strip(_BLANK):  # completes nothing; a model may write a lot of it
                return ""
            head = _HEAD.match(self._text)
            if head is None:
                return ""
            self.name = json.loads(head[1])
            if head[2]:
                self._complete = True
                return "{}"
            text = "{" + self._text[head.end() :]
        return self._hold_back(text)

    def end(self) -> str:
        """What is left of the arguments at the end of the text; they are whole if the text is."""
        tail, self._tail = self._tail.rstrip(), ""
        return tail if self._complete else tail.removesuffix("}").rstrip()

    def _hold_back(self, text: str) -> str:
        """Keeps closing braces: the last of them closes what is around the arguments."""
        certain = text.rstrip(_BLANK + "}")
        if not certain:
            self._tail += text
            return ""
        held, self._tail = self._tail, text[len(certain) :]
        return held + certain


def read_tool_call(text: str) -> tuple[str, str]:
    """The name and the arguments (JSON text) of the call that `text` is.

    Raises InvalidTool when the text ends before its name does.
    """
    reader = ToolCallReader()
    arguments = reader.feed(text) + reader.end()
    if reader.name is None:
        raise InvalidTool("the answer ended before it named a tool; more `max_tokens` may help")
    return reader.name, arguments
