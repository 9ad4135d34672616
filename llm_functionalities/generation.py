"""What is asked of the model besides the prompt."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llm_functionalities.errors import InvalidGrammar
from shared.stubs import llm_pb2

LONGEST_GRAMMAR = 128 * 1024
"""Characters of a grammar: more than model servers take, and read within milliseconds."""


@dataclass(frozen=True)
class Grammar:
    """What the answer has to look like, enforced by the model server: a JSON schema, or a regular expression."""

    json_schema: dict[str, Any] | None = None
    regex: str | None = None

    @classmethod
    def of_request(cls, grammar: llm_pb2.Grammar) -> "Grammar | None":
        """The grammar of a request; None when it has none. Raises InvalidGrammar when it cannot be meant."""
        form = grammar.WhichOneof("form")
        if form is None:
            return None
        if (length := len(getattr(grammar, form))) > LONGEST_GRAMMAR:
            raise InvalidGrammar(f"grammar.{form} has {length} characters; it must have at most {LONGEST_GRAMMAR}")
        if form == "regex":
            if not grammar.regex:
                raise InvalidGrammar("grammar.regex is empty")
            return cls(regex=grammar.regex)
        try:
            schema = json.loads(grammar.json_schema)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(f"grammar.json_schema is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise InvalidGrammar("grammar.json_schema is not a JSON object")
        return cls(json_schema=schema)

    @cached_property
    def payload(self) -> dict[str, Any]:
        """As the text-generation API takes it."""
        if self.regex is not None:
            return {"type": "regex", "value": self.regex}
        # InferenceClient drops every null of its request, and a `"const": null` means something: then as text.
        value = json.dumps(self.json_schema) if _has_null(self.json_schema) else self.json_schema
        return {"type": "json", "value": value}


def _has_null(value: Any) -> bool:
    left = [value]
    while left:
        part = left.pop()
        if part is None:
            return True
        left.extend(part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
    return False


@dataclass(frozen=True)
class Generation:
    """`max_tokens` bounds the answer's length in tokens.

    wish: the grammar is wished for only; a server that takes no grammars may answer without it.
    """

    max_tokens: int
    grammar: Grammar | None = None
    wish: bool = False

    def without_grammar(self) -> "Generation":
        return replace(self, grammar=None, wish=False)
