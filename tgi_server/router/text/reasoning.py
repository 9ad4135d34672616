"""Thoughts that a model writes before its answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around a model's thoughts."""

    begin: str
    end: str

    def open_in(self, prompt: str) -> bool:
        """Returns True if the prompt ends within thoughts, so that the answer begins with them."""
        return prompt.rstrip().endswith(self.begin)


_THINK = ReasoningTags("<think>", "</think>")
REASONING_PARSERS = ("auto", "none", "deepseek_r1", "qwen3")


def reasoning_tags(parser: str, template: str) -> ReasoningTags | None:
    """Returns the tags around reasoning; None if reasoning is not separated from the text.

    parser: one of REASONING_PARSERS, of which `auto` goes by the source of the chat template.
    """
    if parser == "none" or (parser == "auto" and _THINK.end not in template):
        return None
    return _THINK
