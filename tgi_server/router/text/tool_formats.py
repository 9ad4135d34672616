"""The forms in which models write calls of tools, and the grammars that hold a model to one of them.

A form is recognised by the chat template of the model, which shows how earlier calls are written; a model without one
gets TGI's. Whatever the form, the arguments of each call are bound by the schema of their tool.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tgi_server.router.text.reasoning import ReasoningTags
from tgi_server.router.text.tagged_arguments import ArgumentTags, TaggedParameter


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of calls: `begin`, `head` with the name in it, the arguments as JSON, `tail`, `separator`, ..., `end`.

    trigger: the first part of `begin` and `head`. anywhere: it is a mark, behind which nothing but a call can follow,
    and a text may come before the first call; otherwise it is the JSON before the name, and the answer is either calls
    or a text, which is any that does not begin with a call of a tool. triggers: other JSON that may stand for it.
    alone: there is only one call. tags: arguments are written one by one between them. as_json: the form of calls for
    which that cannot be done; it has the same `trigger`, `begin`, `separator` and `end`.
    """

    name: str
    trigger: str
    head: tuple[str, str]
    tail: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    anywhere: bool = True
    triggers: tuple[str, ...] = ()
    alone: bool = False
    tags: ArgumentTags | None = None
    as_json: "ToolFormat | None" = None

    def of(self, arguments: "Arguments") -> "ToolFormat":
        """Returns the form of calls with such arguments."""
        return self.as_json if self.as_json is not None and arguments.tagged is None else self

    def first_head(self, name: str) -> str:
        """Returns what comes between the trigger and the arguments of the first call."""
        return (self.begin + self._head(name)).removeprefix(self.trigger)

    def next_head(self, name: str) -> str:
        """Returns what comes between the tail of one call and the arguments of the next."""
        return self.separator + self._head(name)

    @property
    def layouts(self) -> str:
        """The regular expression of JSON triggers, in the layouts in which models write them."""
        return rf"[ \n]*({'|'.join(''.join(_laid_out(each)) for each in (self.trigger, *self.triggers))})"

    @property
    def layouts_begun(self) -> str:
        """The regular expression of what such triggers may begin with."""
        begun = []
        for each in (self.trigger, *self.triggers):
            pattern = ""
            for part in reversed(_laid_out(each)):
                pattern = f"({part}{pattern})?"
            begun.append(pattern)
        return rf"[ \n]*({'|'.join(begun)})"

    def _head(self, name: str) -> str:
        # In quotes, a name is JSON.
        shown = json.dumps(name, ensure_ascii=False)[1:-1] if self.head[0].endswith('"') else name
        return self.head[0] + shown + self.head[1]

    @property
    def markers(self) -> str:
        """All fixed texts of the form, in which special tokens are looked up."""
        own = "".join((self.begin, *self.head, self.tail, self.separator, self.end))
        if self.tags is None or self.as_json is None:
            return own
        return "".join((own, *self.tags.begin, self.tags.end, self.as_json.markers))


# The terminals of JSON in the grammars of schemas.
_JSON_PARTS = re.compile('"[^"]*"|: |, |{')
# Between the parts of a call's JSON: none, a space, or a line break and what indents the next line.
_LAYOUT = r"\n?[ \t]{0,8}"


def _laid_out(trigger: str) -> list[str]:
    """Returns the regular expressions of each character of some JSON, and of what may stand between its parts."""
    parts = _JSON_PARTS.findall(trigger)
    return [pattern for part in parts for pattern in (*map(re.escape, part.strip()), _LAYOUT)]


# DeepSeek's marks; their bars are wide ones.
_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP = (
    f"<\uff5c{name}\uff5c>"
    for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
)
_JSON_HEAD = ('{"name": "', '", "arguments": ')

HERMES_FORMAT = ToolFormat(
    "hermes", "<tool_call>", ("<tool_call>\n" + _JSON_HEAD[0], _JSON_HEAD[1]), "}\n</tool_call>", "", "\n"
)
_MINIMAX_JSON = ToolFormat(
    "minimax_m2",
    "<minimax:tool_call>",
    ('<invoke name="', '">\n'),
    "\n</invoke>\n",
    "<minimax:tool_call>\n",
    "",
    "</minimax:tool_call>",
)
# As Llama 3.2 begins some calls.
_TYPED = ('{"type": "function", "name": ',)
TGI_FORMAT = ToolFormat(
    "tgi",
    '{"function": {"_name": ',
    ('{"function": {"_name": "', '", "_arguments": '),
    "}}",
    anywhere=False,
    alone=True,
)
_FORMATS = {
    each.name: each
    for each in (
        TGI_FORMAT,
        HERMES_FORMAT,
        ToolFormat(
            "qwen3_coder",
            "<tool_call>",
            ("<tool_call>\n<function=", ">\n"),
            "</function>\n</tool_call>",
            "",
            "\n",
            tags=ArgumentTags(("<parameter=", ">\n"), "\n</parameter>\n"),
            as_json=HERMES_FORMAT,
        ),
        ToolFormat(
            "glm45",
            "<tool_call>",
            ("<tool_call>", "\n"),
            "</tool_call>",
            "",
            "\n",
            tags=ArgumentTags(("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n"),
            as_json=HERMES_FORMAT,
        ),
        replace(
            _MINIMAX_JSON,
            tail="</invoke>\n",
            tags=ArgumentTags(('<parameter name="', '">'), "</parameter>\n"),
            as_json=_MINIMAX_JSON,
        ),
        ToolFormat("mistral", "[TOOL_CALLS]", _JSON_HEAD, "}", "[TOOL_CALLS][", ", ", "]"),
        ToolFormat("mistral_args", "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"), ""),
        ToolFormat(
            "llama3_json",
            '{"name": ',
            ('{"name": "', '", "parameters": '),
            "}",
            "",
            "; ",
            anywhere=False,
            triggers=_TYPED,
        ),
        ToolFormat(
            "deepseek_v3",
            _CALLS,
            (f"{_CALL}function{_SEP}", "\n```json\n"),
            f"\n```{_CALL_END}",
            _CALLS,
            "\n",
            _CALLS_END,
        ),
        ToolFormat(
            "deepseek_v31",
            _CALLS,
            (_CALL, _SEP),
            _CALL_END,
            _CALLS,
            "",
            _CALLS_END,
        ),
        ToolFormat(
            "harmony",
            "<|channel|>commentary to=functions.",
            ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
            "",
            alone=True,
        ),
        ToolFormat("functionary", "<function=", ("<function=", ">"), "</function>"),
        ToolFormat("json", '{"name": ', _JSON_HEAD, "}", anywhere=False, triggers=_TYPED),
    )
}
# Of one answer: a weak model may not find an end.
_MOST_CALLS = 32
FORMAT_NAMES = tuple(_FORMATS)

# Each format, and what the source of a template must have, or must not have, to be of it; the first that fits is taken.
_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", (_CALLS, "```json"), ()),
    ("deepseek_v31", (_CALLS,), ()),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name="), ()),
    ("hermes", ("<tool_call>",), ("<parameter=",)),
    ("harmony", ("<|channel|>commentary", "functions."), ()),
    ("functionary", ("<function=",), ("<parameter=",)),
    ("llama3_json", ("tools", '"parameters": '), ()),
    ("json", ("tools", '{"name": "', '"arguments": '), ()),
)


def tool_format(parser: str, template: str) -> ToolFormat:
    """Returns the form of calls. parser: its name, or `auto`: by the source of the chat template."""
    if parser != "auto":
        return _FORMATS[parser]
    for name, signs, others in _SIGNS:
        if all(sign in template for sign in signs) and not any(other in template for other in others):
            return _FORMATS[name]
    return TGI_FORMAT


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one tool.

    place: of their schema, as a JSON pointer. tagged: they are written one by one; None: as one JSON object.
    """

    place: str
    tagged: Sequence[TaggedParameter] | None = None

    def place_of(self, parameter: TaggedParameter) -> str:
        """Returns the place of the schema of one of them."""
        return f"{self.place}/properties/{parameter.name}"

    @property
    def places(self) -> list[str]:
        """The places of the schemas of all that is JSON in them."""
        return [self.place] if self.tagged is None else [self.place_of(each) for each in self.tagged if not each.text]


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may have.

    arguments: of the tools, by name. required: there is one at least. parallel: there may be several.
    """

    form: ToolFormat
    arguments: Mapping[str, Arguments]
    required: bool
    parallel: bool


class FrameWriter:
    """Writes the Lark grammar of a whole answer. `%schema POINTER` in it stands for JSON that fits a schema."""

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        """special_tokens: names by id. In a grammar they are no text, but tokens of their own."""
        self._ids = {name: token for token, name in special_tokens.items() if name}
        names = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def frame(self, calls: Calls | None, schema: str | None, thoughts: ReasoningTags | None, *, open_: bool) -> str:
        """Returns the grammar of an answer.

        calls: those that it may have. schema: the place of the schema of an answer without calls; None: any text.
        thoughts: what stands around the model's thoughts, which come first. open_: they have begun in the prompt.
        """
        lines = ["%llguidance {}", r"TEXT: /(.|\n)*/", r"BLANK: /[ \n]{0,4}/"]
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
        answers = list(self._answers(calls, schema, opening, others, lines))
        if thoughts is not None:
            thought = self._until(thoughts.end, "thought", [], lines)
            blank = "" if opening else "BLANK"
            known = [f"{begin} {thought} {blank} {each}" for each in answers]
            answers = known + answers if may_think else known
        return "\n".join([*lines, f"start: {' | '.join(answers)}"]) + "\n"

    def _answers(
        self, calls: Calls | None, schema: str | None, opening: str, others: Sequence[str], lines: list[str]
    ) -> Iterator[str]:
        """Yields each kind of answer that there may be.

        opening: what comes before an answer without calls. others: patterns that no text begins with. lines: takes the
        rules that the answers are made of.
        """
        if calls is not None:
            form = calls.form
            in_text = not calls.required and schema is None and not opening
            if in_text and form.anywhere:
                yield f"{self._until(form.trigger, 'prelude', others, lines)} calls"
            elif in_text:
                names = "|".join(_pattern(json.dumps(name, ensure_ascii=False)) for name in calls.arguments)
                others = [*others, f"{form.layouts}({names})"]
                yield "calls"
            elif calls.required or form.anywhere:
                yield f"{self._literal(form.trigger)} calls"
            else:
                # In the terminals of a schema: up to the name, the answer may be either.
                for trigger in (form.trigger, *form.triggers):
                    yield f"{' '.join(map(_quoted, _JSON_PARTS.findall(trigger)))} calls"
            lines += self._call_rules(calls, whole=in_text and not form.anywhere)
        if calls is None or not calls.required:
            if schema is None:
                lines.append(f"OTHER: {_beginning_without(others)}")
            yield f"{opening} {'OTHER' if schema is None else f'%schema {json.dumps(schema)}'}"

    def _call_rules(self, calls: Calls, *, whole: bool) -> Iterator[str]:
        """Yields the rules of calls. whole: the first of them begins with the trigger, in any layout.

        Such a beginning is one terminal: no other can follow where a text might go on.
        """
        if whole:
            yield f"TRIGGER: /{calls.form.layouts}/"
        several = calls.parallel and not calls.form.alone
        more = f" another{{0,{_MOST_CALLS - 1}}}" if several else ""
        yield f"calls: first{more} {self._literal(calls.form.end)}"
        for rule in ("first", "another") if several else ("first",):
            bodies = []
            for i, (name, arguments) in enumerate(calls.arguments.items()):
                form = calls.form.of(arguments)
                head = self._literal(form.first_head(name) if rule == "first" else form.next_head(name))
                if whole and rule == "first":
                    yield f"HEAD{i}: TRIGGER {_quoted(form.first_head(name))}"
                    head = f"HEAD{i}"
                bodies.append(f"{head} arguments{i} {self._literal(form.tail)}")
            yield f"{rule}: {' | '.join(bodies)}"
        for i, arguments in enumerate(calls.arguments.values()):
            yield from self._argument_rules(f"arguments{i}", calls.form.tags, arguments)
        if calls.form.tags is not None and any(each.tagged for each in calls.arguments.values()):
            end = calls.form.tags.end
            if self._begins_special(end):
                yield f"tagged_text: TEXT {self._literal(end)}"
            else:
                yield rf"tagged_text[lazy]: /(.|\n)*/ {_quoted(end)}"

    def _argument_rules(self, rule: str, tags: ArgumentTags | None, arguments: Arguments) -> Iterator[str]:
        if tags is None or arguments.tagged is None:
            yield f"{rule}: %schema {json.dumps(arguments.place)}"
            return
        members = (f"{rule}_{i}{'' if each.required else '?'}" for i, each in enumerate(arguments.tagged))
        yield f"{rule}: {' '.join(members) or _quoted('')}"
        end = self._literal(tags.end)
        for i, each in enumerate(arguments.tagged):
            if each.text:
                values = [*map(_quoted, each.values), *([_quoted("null")] if each.nullable else [])]
                value = f"({' | '.join(values)}) {end}" if each.values else "tagged_text"
            else:
                value = f"%schema {json.dumps(arguments.place_of(each))} {end}"
            yield f"{rule}_{i}: {self._literal(tags.tag(each.name))} {value}"

    def _until(self, marker: str, rule: str, others: Sequence[str], lines: list[str]) -> str:
        """Returns the grammar of a text up to the first `marker`. others: patterns that it must not begin with."""
        if self._begins_special(marker):
            return f"TEXT {self._literal(marker)}"
        lines.append(f"{rule}[lazy]: {_beginning_without(others)} {_quoted(marker)}")
        return rule

    def _begins_special(self, text: str) -> bool:
        """Returns True for what no text can be the beginning of, since it begins with a special token."""
        return self._special is not None and self._special.match(text) is not None

    def _literal(self, text: str) -> str:
        """Returns a text in Lark, its special tokens by their ids."""
        parts = self._special.split(text) if self._special is not None else [text]
        shown = (f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part) for part in parts if part)
        return " ".join(shown)


def _quoted(text: str) -> str:
    """Returns a text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """Returns a text as a part of a regular expression in Lark."""
    return re.escape(text).replace("/", r"\/")


def _beginning_without(patterns: Sequence[str]) -> str:
    """Returns Lark for any text, also an empty one, that begins with a match of none of the patterns."""
    return rf"(/(.|\n)*/ & ~/({'|'.join(patterns)})(.|\n)*/)" if patterns else r"/(.|\n)*/"
