"""The grammar of a whole answer: thoughts, then calls of tools in the model's own form, or a text, or JSON."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tgi_server.router.answers.formats import (
    DOUBLED_BRACES,
    JSON_PARTS,
    NUMBER,
    TEXT_ARGUMENTS,
    TEXT_BETWEEN,
    TEXT_END,
    ToolFormat,
)
from tgi_server.router.answers.reasoning import ReasoningTags
from tgi_server.router.answers.response_template import Mark
from tgi_server.router.answers.tagged_arguments import Arguments, ArgumentTags, TaggedParameter

# Regular expressions without anchors, references and conditions, which are the same in grammars.
_PORTABLE = re.compile(
    r"(?>\\[sSwWdDnt]|\\[^\w/]|\[\^?([^\[\]\\/]|\\[^/])+\]|\((\?P<\w+>|\?:|(?!\?))|\)|[*+?]\??|[^\\\[\](){}*+?^$])*+"
)
_BACKSLASH = re.compile(r"\\(?=\W)")
_BREAKS = re.compile(r"\n+")
# White space where models write it: two line breaks at most, as far as an indent. Without a bound, it would be a loop.
_WHITE_SPACE = (r"BREAK: /((\n {0,4}){1,2})?/", r"GAP: /( |\n{1,2})?/", r"LINE: /\n?/")
# Of one answer: a weak model may not find an end.
_MOST_CALLS = 32


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may have.

    arguments: the tools' arguments by tool name. required: there is at least one call. parallel: there may be several.
    as_text: an answer that is only the JSON of calls counts as calls; only if the answer may be a text.
    """

    form: ToolFormat
    arguments: Mapping[str, Arguments]
    required: bool
    parallel: bool
    as_text: bool = False


class FrameWriter:
    """Writes the Lark grammar of a whole answer. `%schema POINTER` in it stands for JSON that fits a schema."""

    def __init__(self, special_tokens: Mapping[int, str], marks: Mapping[int, str]) -> None:
        """special_tokens: names by id. In a grammar they are tokens of their own, not text.

        marks: other tokens that the tokenizer has for marks of calls. They are text, too, but two of them that begin
        alike would not be written as tokens if the grammar had them as text.
        """
        self._ids = {name: token for token, name in {**marks, **special_tokens}.items() if name}
        self._special = _any_of(special_tokens.values())
        self._tokens = _any_of(self._ids)

    def frame(self, calls: Calls | None, schema: str | None, thoughts: ReasoningTags | None, *, open_: bool) -> str:
        """Returns the grammar of an answer.

        calls: the calls that it may have. schema: the place of the schema of an answer without calls; None: any text.
        thoughts: the tags of the model's reasoning, which comes first. open_: the reasoning has begun in the prompt.
        """
        return self._after_thoughts(partial(self._answers, calls, schema), thoughts, open_=open_)

    def without_calls(
        self, form: ToolFormat, arguments: Mapping[str, Arguments], thoughts: ReasoningTags | None, *, open_: bool
    ) -> str:
        """Returns the grammar of a text without calls. arguments: those of the tools that it must not call, by name."""

        def answers(opening: str, others: Sequence[str], lines: list[str]) -> Iterator[str]:
            if not form.anywhere:
                others = [*others, _called(form, arguments)]
            elif not self._begins_special(form.trigger):
                others = [*others, rf"(.|\n)*{_pattern(form.trigger)}"]
            lines.append(f"OTHER: {_beginning_without(others)}")
            yield f"{opening} OTHER"

        return self._after_thoughts(answers, thoughts, open_=open_)

    def one_call(
        self, marks: Sequence[tuple[Mark, Mark]], thoughts: ReasoningTags | None, *, open_: bool
    ) -> str | None:
        """Returns the grammar of an answer that ends after its first call; only its marks are known.

        marks: the beginning and the end of each kind of calls. None: a grammar cannot have one of them.
        """
        rules: list[str] = []
        closed = [self._until_mark(end, f"called{i}", [], rules) for i, (_, end) in enumerate(marks)]

        def answers(opening: str, others: Sequence[str], lines: list[str]) -> Iterator[str]:
            lines += rules
            for i, (begin, _) in enumerate(marks):
                yield f"({self._until_mark(begin, f'prelude{i}', others, lines)}) ({closed[i]})"
            lines.append(f"OTHER: {_beginning_without(others)}")
            yield "OTHER"

        possible = all(self._until_mark(begin, "prelude", [], []) for begin, _ in marks) and all(closed)
        return self._after_thoughts(answers, thoughts, open_=open_) if possible else None

    def _after_thoughts(
        self,
        written: Callable[[str, Sequence[str], list[str]], Iterator[str]],
        thoughts: ReasoningTags | None,
        *,
        open_: bool,
    ) -> str:
        """Returns the grammar of thoughts and then one of the answers that `written` yields (see `_answers`)."""
        lines = ["%llguidance {}", r"TEXT: /(.|\n)*/", r"BLANK: /[ \n]{0,4}/", *_WHITE_SPACE]
        may_think = thoughts is not None and not open_
        # A text that might also be thoughts, or a call, would hide them.
        others: list[str] = []
        begin = ""
        if thoughts is not None and may_think and self._begins_special(thoughts.begin):
            begin = f"BLANK {self._literal(thoughts.begin)}"
        elif thoughts is not None and may_think:
            others.append(rf"[ \n]*{_pattern(thoughts.begin)}")
            lines.append(f"BEGIN: /{others[0]}/")
            begin = "BEGIN"
        opening = self._literal(thoughts.opening) if thoughts is not None else ""
        answers = list(written(opening, others, lines))
        if thoughts is not None:
            thought = self._until(thoughts.end, "thought", [], lines)
            blank = "" if opening else "BLANK"
            after = answers
            if thoughts.around is not None and "OTHER" not in answers[-1]:  # which is any text
                first, last = map(self._literal, thoughts.around)
                after = [*answers, *(f"{first} BLANK ({answer}) BLANK {last}" for answer in answers)]
            known = [f"{begin} {thought} {blank} {each}" for each in after]
            answers = known + answers if may_think else known
        return "\n".join([*lines, f"start: {' | '.join(answers)}"]) + "\n"

    def _answers(
        self, calls: Calls | None, schema: str | None, opening: str, others: Sequence[str], lines: list[str]
    ) -> Iterator[str]:
        """Yields the alternatives of an answer.

        opening: the text before an answer without calls. others: patterns with which no text may begin. lines: the list
        to which the rules of the alternatives are appended.
        """
        if calls is not None:
            form = calls.form
            in_text = not calls.required and schema is None and not opening
            if calls.as_text:
                names = "|".join(_pattern(json.dumps(name, ensure_ascii=False)) for name in calls.arguments)
                others = [*others, f"{form.text_layouts}({names})", DOUBLED_BRACES]
                lines += self._text_call_rules(calls)
                yield f"{opening} text_call"
            if in_text and form.anywhere:
                yield f"{self._until(form.trigger, 'prelude', others, lines)} calls"
            elif in_text:
                others = [*others, _called(form, calls.arguments)]
                yield "calls"
            elif calls.required or form.anywhere:
                yield f"GAP {self._literal(form.trigger)} calls"
            else:
                # In the terminals of a schema: up to the name, the answer may be either.
                for trigger in (form.trigger, *form.triggers):
                    yield f"{' '.join(map(_quoted, JSON_PARTS.findall(trigger)))} calls"
            lines += self._call_rules(calls, whole=in_text and not form.anywhere)
        if calls is None or not calls.required:
            if schema is None:
                lines.append(f"OTHER: {_beginning_without(others)}")
            yield f"{opening} {'OTHER' if schema is None else f'%schema {json.dumps(schema)}'}"

    def _text_call_rules(self, calls: Calls) -> Iterator[str]:
        """Yields the rules of an answer that is nothing but the JSON of calls; see `_call_rules` about its head."""
        yield f"TEXT_BEGIN: /{calls.form.text_layouts}/"
        yield f"TEXT_ARGUMENTS: /{TEXT_ARGUMENTS}/"
        yield f"TEXT_END: /{TEXT_END}/"
        heads, names = [], []
        for i, (name, arguments) in enumerate(calls.arguments.items()):
            quoted = _quoted(json.dumps(name, ensure_ascii=False))
            yield f"TEXT_HEAD{i}: TEXT_BEGIN {quoted}"
            yield f'text_rest{i}: TEXT_ARGUMENTS %schema {json.dumps(arguments.place)} BREAK "}}"'
            heads.append(f"TEXT_HEAD{i} text_rest{i}")
            names.append(f"{quoted} text_rest{i}")
        more = ""
        if calls.parallel:
            yield f"TEXT_BETWEEN: /{TEXT_BETWEEN}/"
            yield f"text_next: TEXT_BETWEEN ({' | '.join(names)})"
            more = f"text_next{{0,{_MOST_CALLS - 1}}}"
        yield f"text_call: ({' | '.join(heads)}) {more} TEXT_END"

    def _call_rules(self, calls: Calls, *, whole: bool) -> Iterator[str]:
        """Yields the rules of calls. whole: the first of them begins with the trigger, in any layout.

        Such a beginning is one terminal: no other can follow where a text might continue. Where another call or the end
        may follow, so may white space: a model that writes a line break before its end chooses there.
        """
        if whole:
            yield f"TRIGGER: /{calls.form.layouts}/"
        several = calls.parallel and not calls.form.alone
        more = f" another{{0,{_MOST_CALLS - 1}}}" if several else ""
        yield f"calls: first{more} {'GAP' if several or calls.form.end else ''} {self._literal(calls.form.end)}"
        separator = calls.form.separator.strip()
        between = f"GAP {self._literal(separator)} GAP" if separator else "GAP"
        for rule in ("first", "another") if several else ("first",):
            bodies = []
            for i, (name, arguments) in enumerate(calls.arguments.items()):
                form = calls.form.of(arguments)
                head = self._spaced(form.first_head(name))
                if rule == "another":
                    head = f"{between} {self._spaced(form.call_head(name))}"
                elif whole:
                    yield f"HEAD{i}: TRIGGER {_quoted(form.first_head(name))}"
                    head = f"HEAD{i}"
                blank = "BREAK" if arguments.tagged is not None and form.tags and not form.tags.separator else ""
                tail = self._spaced(form.tail.removeprefix("\n") if blank else form.tail)
                after_head = "BREAK" if not blank and form.head[1].endswith("\n") else ""
                bodies.append(f"{head} {after_head} arguments{i} {blank} {tail}")
            yield f"{rule}: {' | '.join(bodies)}"
        for i, arguments in enumerate(calls.arguments.values()):
            yield from self._argument_rules(f"arguments{i}", calls.form.tags, arguments)
        tags = calls.form.tags
        if tags is not None and tags.end and any(argument.tagged for argument in calls.arguments.values()):
            lines: list[str] = []
            yield f"tagged_text: {self._until(tags.closing, 'untagged', [], lines)}"
            yield from lines

    def _argument_rules(self, rule: str, tags: ArgumentTags | None, arguments: Arguments) -> Iterator[str]:
        if tags is None or arguments.tagged is None:
            yield f"{rule}: %schema {json.dumps(arguments.place)}"
            return
        before = "" if tags.separator else "BREAK"
        for i, each in enumerate(arguments.tagged):
            tag = self._spaced(tags.tag(each.name, text=each.text))
            value = f"{before} {tag} {self._value(tags, each, arguments)}"
            if each.nullable and tags.begin_text is not None:
                null = self._spaced(tags.tag(each.name, text=False) + "null" + tags.closing)
                value += f" | {before} {null}"
            yield f"{rule}_{i}: {value}"
        if tags.separator:
            yield from self._list(rule, tags.separator, arguments.tagged)
            return
        members = (f"{rule}_{i}{'' if each.required else '?'}" for i, each in enumerate(arguments.tagged))
        yield f"{rule}: {' '.join(members) or _quoted('')}"

    def _value(self, tags: ArgumentTags, parameter: TaggedParameter, arguments: Arguments) -> str:
        """Returns the grammar of a value, and of what stands around it after its tag."""
        end = self._literal(tags.closing)
        line = "LINE" if tags.in_lines else ""
        if parameter.text:
            texts = " | ".join(map(_quoted, parameter.values))
            null = _quoted("null") if parameter.nullable and tags.begin_text is None else ""
            if tags.separator:
                value = f"{self._literal(tags.quote)} {f'({texts}) {end}' if texts else 'tagged_text'}"
                return f"({value} | {null})" if null else value
            return f"{line} ({' | '.join(filter(None, (texts, null)))}) {line} {end}" if texts else "tagged_text"
        if parameter.boolean and tags.words:
            return f"({' | '.join(map(_quoted, tags.words.values()))})"
        schema = f"%schema {json.dumps(arguments.place_of(parameter))}"
        return schema if tags.separator else f"BREAK {schema} BREAK {end}"

    def _list(self, rule: str, separator: str, parameters: Sequence[TaggedParameter]) -> Iterator[str]:
        """Yields the rules of arguments with a separator between them; some arguments may be left out."""
        # From the last to the first: what may follow if an argument has been written (after), and if none has (first).
        after = first = _quoted("")
        for i, each in reversed(list(enumerate(parameters))):
            own = f"{rule}_{i}"
            yield f"{own}_next: {self._literal(separator)} {own} {after}{'' if each.required else f' | {after}'}"
            yield f"{own}_first: {own} {after}{'' if each.required else f' | {first}'}"
            after, first = f"{own}_next", f"{own}_first"
        yield f"{rule}: {first}"

    def _until(self, marker: str, rule: str, others: Sequence[str], lines: list[str]) -> str:
        """Returns the grammar of a text up to the first `marker`. others: patterns that it must not begin with."""
        special = self._special.search(marker) if self._special is not None else None
        if special is not None and special.start() == 0 and not others:
            return f"TEXT {self._literal(marker)}"
        if special is not None:  # which ends the text, and what the marker begins with is the last of that
            before = marker[: special.start()]
            lines.append(f"{rule.upper()}: {_beginning_without(others, _pattern(before))}")
            return f"{rule.upper()} {self._literal(marker[special.start() :])}"
        lines.append(f"{rule}[lazy]: {_beginning_without(others)} {_quoted(marker)}")
        return rule

    def _until_mark(self, mark: Mark, rule: str, others: Sequence[str], lines: list[str]) -> str | None:
        """Returns the grammar of a text up to the first such mark; None for a pattern that a grammar cannot have."""
        if mark.texts:
            return " | ".join(self._until(text, f"{rule}_{i}", others, lines) for i, text in enumerate(mark.texts))
        pattern = mark.pattern.pattern
        begun = _BACKSLASH.sub("", pattern.removeprefix(r"\s*"))
        special = self._special.search(begun) if self._special is not None else None
        if special is not None and special.start() == 0:
            return self._until(special[0], rule, others, lines)
        if special is not None or _PORTABLE.fullmatch(pattern) is None:
            return None
        pattern = pattern.replace("/", r"\/").replace("\n", r"\n")
        lines.append(f"{rule}[lazy]: {_beginning_without(others, pattern)}")
        return rule

    def _spaced(self, text: str) -> str:
        """Returns a text in Lark with any white space where it has line breaks; none at its end."""
        return " BREAK ".join(map(self._literal, _BREAKS.split(text.rstrip("\n")))).strip()

    def _begins_special(self, text: str) -> bool:
        """Returns True for what no text can be the beginning of, since it begins with a special token."""
        return self._special is not None and self._special.match(text) is not None

    def _literal(self, text: str) -> str:
        """Returns a text in Lark, its special tokens and marks by their ids."""
        parts = self._tokens.split(text) if self._tokens is not None else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else _plain(part) for part in parts if part)


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """Returns the regular expression of some texts, which matches the longest; None without any."""
    found = sorted(filter(None, names), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, found))})") if found else None


def _plain(text: str) -> str:
    """Returns a text in Lark, with any number in the place of one."""
    return " /[0-9]{1,9}/ ".join(_quoted(part) if part else "" for part in text.split(NUMBER)).strip()


def _called(form: ToolFormat, arguments: Mapping[str, Arguments]) -> str:
    """Returns the pattern of the beginning of a call whose trigger is JSON, up to the name of one of the tools."""
    names = "|".join(_pattern(form.of(each).named(name)) for name, each in arguments.items())
    return f"{form.layouts}({names})"


def _quoted(text: str) -> str:
    """Returns a text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """Returns a text as a part of a regular expression in Lark."""
    return re.escape(text).replace("/", r"\/")


def _beginning_without(patterns: Sequence[str], end: str = "") -> str:
    """Returns Lark for any text that begins with a match of none of the patterns, and ends with one of `end`."""
    text = rf"/(.|\n)*{f'({end})' if end else ''}/"
    return rf"({text} & ~/({'|'.join(patterns)})(.|\n)*/)" if patterns else text
