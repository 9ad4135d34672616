"""Thoughts that a model writes before its answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around a model's reasoning.

    opening: the text before the answer. asides: texts that may begin other parts, which end like reasoning. repeats:
    further reasoning and parts may follow at once. around: the marks that may enclose the answer after the reasoning.
    """

    begin: str
    end: str
    opening: str = ""
    asides: tuple[str, ...] = ()
    repeats: bool = False
    around: tuple[str, str] | None = None

    def named_in(self, template: str) -> bool:
        """Returns True if the source of a chat template has the marks."""
        marks = (self.begin,) if self.opening else (self.begin, self.end)
        return any(mark in template for mark in marks) and "".join(self.around or ()) in template

    def open_in(self, prompt: str, begun: str = "") -> bool:
        """Returns True if the prompt ends within thoughts, so that the answer begins with them.

        begun: a text of the assistant, which the answer continues if the prompt ends with it.
        """
        continued = bool(begun.strip()) and prompt.rstrip().endswith(begun.rstrip())
        if continued and begun.rfind(self.begin.rstrip()) > begun.rfind(self.end):
            return True
        return prompt.rstrip().endswith(self.begin.rstrip())


_THINK = ReasoningTags("<think>", "</think>")
# gpt-oss writes messages, each in a channel.
_HARMONY = ReasoningTags(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    "<|channel|>final<|message|>",
    ("<|channel|>commentary<|message|>",),
    repeats=True,
)
_PARSERS = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "harmony": _HARMONY,
    "gemma4": ReasoningTags("<|channel>thought\n", "<channel|>"),
    "granite": ReasoningTags("Here is my thought process:", "Here is my response:"),
    "granite33": ReasoningTags("<think>", "</think>", around=("<response>", "</response>")),
    "kimi_vl": ReasoningTags("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
}
REASONING_NAMES = tuple(_PARSERS)


def reasoning_tags(parser: str, template: str) -> ReasoningTags | None:
    """Returns the tags around reasoning; None if reasoning is not separated from the text.

    parser: one of REASONING_NAMES, or `none`; `auto` goes by the source of the chat template.
    """
    if parser != "auto":
        return _PARSERS.get(parser)
    own = (tags for tags in _PARSERS.values() if tags is not _THINK)
    return next((tags for tags in (*own, _THINK) if tags.named_in(template)), None)
