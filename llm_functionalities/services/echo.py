"""The part of a prompt that its answer repeats: a JSON object that the prompt leaves open, all of it, or nothing.

Callers of models whose output begins with the prompt write the first half of an object into their prompts,
`{"intent":`, and look for the whole object in the answer. The second half alone, which is what the model writes, is
none that they can parse.
"""

import re

from pydantic_core import from_json

from llm_functionalities.settings import PromptEcho

# Characters at a prompt's end in which an open object is looked for, and places where it may begin.
LONGEST_OPENING = 1000
MOST_ATTEMPTS = 50


class EchoedAnswer:
    """The answer to one prompt as its caller gets it, made piece by piece of what the model writes."""

    def __init__(self, prompt: str, echo: PromptEcho, *, has_grammar: bool) -> None:
        """has_grammar: the answer has a form of its own, so it is not the second half of an object."""
        opening = "" if has_grammar or echo == "none" else open_object(prompt)
        self._echo = echo
        self._before = {"object": opening, "prompt": prompt, "none": ""}[echo]
        self._object = _OpenObject(opening) if opening else None
        # A brace alone may open anything, such as a block of code. The model's next character tells.
        self._is_brace = opening.strip() == "{"
        self._held = ""

    @property
    def ended(self) -> bool:
        """True once the object that the prompt began is closed. What the model writes after it is left out."""
        return self._object is not None and not self._object.brackets

    def add(self, text: str) -> str:
        """Returns what the caller gets for `text`, which the model wrote next."""
        if self.ended:
            return ""
        if self._is_brace:
            text = self._held = self._held + text
            if not text.strip():
                return ""
            self._is_brace = False
            if not text.lstrip().startswith('"'):
                self._object = None
                self._before = "" if self._echo == "object" else self._before
        before, self._before = self._before, ""
        return before + (self._object.take(text) if self._object is not None else text)

    def whole(self, text: str) -> str:
        """Returns what the caller gets for a whole answer, without white space around what the model wrote."""
        echoed = self.add(text).rstrip()
        return echoed if self._echo == "prompt" else echoed.lstrip()


def open_object(prompt: str) -> str:
    """Returns the end of `prompt` from where a JSON object begins that is not closed; "" without one."""
    end = prompt[-LONGEST_OPENING:]
    begins = [brace.start() for brace in re.finditer(r'\{(?=\s*("|$))', end)]
    return next((end[begin:] for begin in begins[-MOST_ATTEMPTS:] if _is_open(end[begin:])), "")


def _is_open(text: str) -> bool:
    """Returns True if `text` is the beginning of a JSON object, and not a whole one."""
    try:
        from_json(text, allow_partial=True)
    except ValueError:
        return False
    return bool(_OpenObject(text).brackets)


class _OpenObject:
    """A JSON object that arrives in pieces. `brackets` are the open ones: none at its end."""

    def __init__(self, opening: str) -> None:
        """opening: begins with the object's brace."""
        self.brackets: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self.take(opening)

    def take(self, text: str) -> str:
        """Returns the part of the next piece that belongs to the object."""
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self.brackets.append(character)
            elif character in "}]":
                self.brackets.pop()
                if not self.brackets:
                    return text[: place + 1]
        return text
