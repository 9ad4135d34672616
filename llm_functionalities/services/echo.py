"""Repeats a part of the prompt before its answer: an unfinished JSON object at its end, the whole prompt, or nothing.

Some models' output begins with the prompt. Callers that are used to this end their prompts with the first half of a
JSON object, such as `{"intent":`, and look for the whole object in the answer. They could not parse the second half
alone, which is what the model writes.
"""

import re

from pydantic_core import from_json

from llm_functionalities.settings import PromptEcho

# The characters at a prompt's end that are searched for an unfinished object, and the most braces that are tried.
LONGEST_OPENING = 1000
MOST_ATTEMPTS = 50


class EchoedAnswer:
    """Turns the pieces that the model writes for one prompt into the answer that its caller gets."""

    def __init__(self, prompt: str, echo: PromptEcho, *, has_grammar: bool) -> None:
        """has_grammar: the answer follows a grammar, so it does not continue an object of the prompt."""
        opening = "" if has_grammar or echo == "none" else open_object(prompt)
        self._echo = echo
        self._before = {"object": opening, "prompt": prompt, "none": ""}[echo]
        self._object = _OpenObject(opening) if opening else None
        # A single brace may also begin a block of code. The next character that the model writes decides.
        self._is_brace = opening.strip() == "{"
        self._held = ""

    @property
    def ended(self) -> bool:
        """True once the object that the prompt began is complete. Later text of the model is left out."""
        return self._object is not None and not self._object.brackets

    def add(self, text: str) -> str:
        """Returns the text that the caller gets for the model's next piece `text`."""
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
        """Returns the answer that the caller gets if the model wrote `text` in all.

        Strips white space at its ends, except at the beginning of an echoed prompt.
        """
        echoed = self.add(text).rstrip()
        return echoed if self._echo == "prompt" else echoed.lstrip()


def open_object(prompt: str) -> str:
    """Returns the unfinished JSON object at the end of `prompt`; "" if there is none."""
    end = prompt[-LONGEST_OPENING:]
    begins = [brace.start() for brace in re.finditer(r'\{(?=\s*("|$))', end)]
    return next((end[begin:] for begin in begins[-MOST_ATTEMPTS:] if _is_open(end[begin:])), "")


def _is_open(text: str) -> bool:
    """Returns True if `text` is the beginning of a JSON object that is not complete."""
    try:
        from_json(text, allow_partial=True)
    except ValueError:
        return False
    return bool(_OpenObject(text).brackets)


class _OpenObject:
    """A JSON object that arrives in pieces. `brackets` are those that are still open: none once it is complete."""

    def __init__(self, opening: str) -> None:
        """opening: the object's first piece, which begins with its brace."""
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
