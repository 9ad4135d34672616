"""The parameters of a generation, which are sent to a text-generation server together with the prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Grammar:
    """The grammar that the model server enforces: a JSON schema, or a regular expression."""

    json_schema: dict[str, Any] | None = None
    regex: str | None = None

    @cached_property
    def payload(self) -> dict[str, Any]:
        """The grammar in the form of the text-generation API."""
        if self.regex is not None:
            return {"type": "regex", "value": self.regex}
        # InferenceClient drops every null of its request, but `"const": null` has a meaning. As text, it is kept.
        value = json.dumps(self.json_schema) if _has_null(self.json_schema) else self.json_schema
        return {"type": "json", "value": value}


@dataclass(frozen=True)
class GenerationParameters:
    """The parameters that are sent to a text-generation server together with the prompt.

    max_tokens: maximum number of tokens of the answer. grammar_is_optional: True if a server without grammar support
    may answer without it. adapter_id: id of an adapter of the server; None: no adapter. sampling: further arguments of
    `InferenceClient.text_generation`, such as `temperature`. stop: texts that end the answer.
    """

    max_tokens: int
    grammar: Grammar | None = None
    grammar_is_optional: bool = False
    adapter_id: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()

    def parameters(self) -> dict[str, Any]:
        """Returns the keyword arguments of `InferenceClient.text_generation`."""
        return {
            "max_new_tokens": self.max_tokens,
            "grammar": self.grammar.payload if self.grammar else None,
            "adapter_id": self.adapter_id,
            "stop": list(self.stop) or None,
            "return_full_text": False,
            **self.sampling,
        }

    def without_grammar(self) -> "GenerationParameters":
        return replace(self, grammar=None, grammar_is_optional=False)


@dataclass(frozen=True)
class GeneratedText:
    """A generated text, or a piece of it.

    finish_reason: why the whole text ended; "" for other pieces, and if the server does not report it. prompt_tokens,
    generated_tokens: those of the whole text; 0 if they are not known. model: name of the model that wrote it, if the
    call listed models.
    """

    text: str
    finish_reason: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    model: str = ""


def _has_null(value: Any) -> bool:
    left = [value]
    while left:
        part = left.pop()
        if part is None:
            return True
        left.extend(part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
    return False
