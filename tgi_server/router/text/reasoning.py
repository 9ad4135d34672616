"""Thoughts that a model writes before its answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around a model's thoughts. opening: what comes before a text that is the answer."""

    begin: str
    end: str
    opening: str = ""

    def open_in(self, prompt: str) -> bool:
        """Returns True if the prompt ends within thoughts, so that the answer begins with them."""
        return prompt.rstrip().endswith(self.begin)


_THINK = ReasoningTags("<think>", "</think>")
# gpt-oss writes messages, each in a channel.
_HARMONY = ReasoningTags("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>")
_PARSERS = {"deepseek_r1": _THINK, "qwen3": _THINK, "harmony": _HARMONY}
REASONING_PARSERS = ("auto", "none", *_PARSERS)


def reasoning_tags(parser: str, template: str) -> ReasoningTags | None:
    """Returns the tags around reasoning; None if reasoning is not separated from the text.

    parser: one of REASONING_PARSERS, of which `auto` goes by the source of the chat template.
    """
    if parser != "auto":
        return _PARSERS.get(parser)
    signs = {_HARMONY.begin: _HARMONY, _THINK.end: _THINK}
    return next((tags for sign, tags in signs.items() if sign in template), None)
