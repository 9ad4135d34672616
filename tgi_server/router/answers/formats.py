"""The forms in which models write calls of tools.

A form is recognized by the chat template of the model, which shows how earlier calls are written; a model without one
gets TGI's. Whatever the form, the arguments of each call are bound by the schema of their tool.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tgi_server.router.answers.tagged_arguments import Arguments, ArgumentTags


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of calls: `begin`, `head` with the name in it, the arguments as JSON, `tail`, `separator`, ..., `end`.

    trigger: the first part of `begin` and `head`. anywhere: it is a mark, after which nothing but a call can follow,
    and a text may come before the first call; otherwise it is the JSON before the name, and the answer is either calls
    or a text, which is any that does not begin with a call of a tool. triggers: other JSON that may stand for it.
    alone: there is only one call. numbered: after the name is a colon and the number of the call, and both are its id.
    tags: arguments are written one by one between them. as_json: the form of calls for which that cannot be done; it
    has the same `trigger`, `begin`, `separator` and `end`.
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
    numbered: bool = False
    tags: ArgumentTags | None = None
    as_json: "ToolFormat | None" = None

    def of(self, arguments: Arguments) -> "ToolFormat":
        """Returns the form of calls with such arguments."""
        return self.as_json if self.as_json is not None and arguments.tagged is None else self

    def first_head(self, name: str) -> str:
        """Returns what comes between the trigger and the arguments of the first call."""
        return (self.begin + self.call_head(name)).removeprefix(self.trigger)

    @property
    def layouts(self) -> str:
        """The regular expression of white space and JSON triggers, in the layouts in which models write them."""
        return rf"[ \n]*{self.layout}"

    @property
    def layout(self) -> str:
        """The regular expression of JSON triggers, in the layouts in which models write them."""
        return f"({'|'.join(''.join(_laid_out(each)) for each in (self.trigger, *self.triggers))})"

    @property
    def text_layouts(self) -> str:
        """The regular expression of the beginning of the calls that a model writes as a text, up to the first name.

        They are JSON, in a fence or not, in a list or not. JSON without both belongs to a form whose calls are such
        JSON themselves.
        """
        fence, list_ = rf"[ \n]{{0,8}}{_FENCE}", r"[ \n]*\["
        own = self.trigger == JSON_FORMAT.trigger
        before = f"({fence}({list_})?|{list_})" if own else f"({fence})?({list_})?"
        return f"{before}{JSON_FORMAT.layouts}"

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

    def call_head(self, name: str) -> str:
        """Returns what comes between the separator and the arguments of a call that follows others."""
        # In quotes, a name is JSON.
        shown = json.dumps(name, ensure_ascii=False)[1:-1] if self.head[0].endswith('"') else name
        return self.head[0] + shown + (f":{NUMBER}" if self.numbered else "") + self.head[1]

    def named(self, name: str) -> str:
        """Returns a name, and what distinguishes a call from a text that begins like one."""
        shown = json.dumps(name, ensure_ascii=False)
        return shown if self.head[0].endswith('"') else shown[1:-1] + self.head[1]

    @property
    def markers(self) -> str:
        """All fixed texts of the form, in which special tokens are looked up."""
        own = "".join((self.begin, *self.head, self.tail, self.separator, self.end))
        if self.tags is None or self.as_json is None:
            return own
        return "".join((own, *self.tags.marks, self.as_json.markers))


# Stands for the number of a call.
NUMBER = "\ue000"
# The terminals of JSON in the grammars of schemas.
JSON_PARTS = re.compile('"[^"]*"|: |, |[{[]')
# Between the parts of a call's JSON: none, a space, or a line break and what indents the next line.
_LAYOUT = r"\n?[ \t]{0,8}"
# The beginning of a code fence.
_FENCE = r"```[A-Za-z_]{0,16}[ \n]"


def _laid_out(trigger: str) -> list[str]:
    """Returns the regular expressions of each character of some JSON, and of what may stand between its parts."""
    parts = JSON_PARTS.findall(trigger)
    return [pattern for part in parts for pattern in (*map(re.escape, part.strip()), _LAYOUT)]


def json_name(names: Iterable[str]) -> str:
    """Returns the regular expression of a name in JSON that is no longer than the longest of some names."""
    longest = max((len(json.dumps(name)) for name in names), default=0)
    return rf'(?P<name>"([^"\\\n]|\\[^\n]){{0,{longest}}}")'


# What the template of Qwen2.5-Coder shows as the beginning of a call. The model repeats it, although it is not JSON.
# Both braces are one token, and a mask after them would come too late: the model continues in another layout.
DOUBLED_BRACES = r"([ \n]{0,8}```(json)?[ \n])?([ \n]*\[)?[ \n]*\{\{"

# DeepSeek's marks; their bars are wide ones.
_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP = (
    f"<\uff5c{name}\uff5c>"
    for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
)
_JSON_HEAD = ('{"name": "', '", "arguments": ')
_DSML = "\uff5cDSML\uff5c"

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
JSON_FORMAT = ToolFormat("json", '{"name": ', _JSON_HEAD, "}", anywhere=False, triggers=_TYPED)
# Calls that a model writes as a text, for grammars and readers: the patterns between a call's name and its arguments,
# between a call and the next name, and after the last call. Models write a list, or one JSON object after the other,
# with or without a code fence around each.
TEXT_ARGUMENTS = rf'{_LAYOUT},{_LAYOUT}"(arguments|parameters)"{_LAYOUT}:{_LAYOUT}'
_BLANK = r" ?(\n {0,8}){0,2}"
_CLOSED = rf"{_BLANK}(\]{_BLANK})?(```{_BLANK})?"
TEXT_BETWEEN = rf"({_BLANK}[,;]{_BLANK}|{_CLOSED}({_FENCE}{_BLANK})?(\[{_BLANK})?){JSON_FORMAT.layout}"
TEXT_END = _CLOSED
_SEED_JSON = ToolFormat(
    "seed_oss",
    "<seed:tool_call>",
    ("<seed:tool_call>\n" + _JSON_HEAD[0], _JSON_HEAD[1]),
    "}\n</seed:tool_call>",
    "",
    "\n",
)
_GEMMA_JSON = ToolFormat("gemma4", "<|tool_call>", ("<|tool_call>call:", ""), "<tool_call|>")
# Calls as Python has them. A dictionary of arguments is one, too.
_PYTHON_TAGS = ArgumentTags(("", "="), "", ", ", words={"true": "True", "false": "False"})
_PYTHON_JSON = ToolFormat("pythonic", "[", ("", "(**"), ")", "[", ", ", "]", anywhere=False)
_LFM_JSON = replace(
    _PYTHON_JSON,
    name="lfm2",
    trigger="<|tool_call_start|>",
    begin="<|tool_call_start|>[",
    end="]<|tool_call_end|>",
    anywhere=True,
)
# One call a line; words as in JSON.
_OLMO_JSON = replace(
    _PYTHON_JSON,
    name="olmo3",
    trigger="<function_calls>",
    begin="<function_calls>",
    separator="\n",
    end="</function_calls>",
    anywhere=True,
)


def _dsml(name: str, wrapper: str) -> ToolFormat:
    """Returns the form of DeepSeek's newer models, between tags that are called so."""
    trigger, end = f"<{_DSML}{wrapper}>", f"</{_DSML}{wrapper}>"
    head = (f'<{_DSML}invoke name="', '">\n')
    tags = ArgumentTags(
        (f'<{_DSML}parameter name="', '" string="false">'),
        f"</{_DSML}parameter>\n",
        begin_text=(f'<{_DSML}parameter name="', '" string="true">'),
    )
    as_json = ToolFormat(name, trigger, head, f"\n</{_DSML}invoke>\n", f"{trigger}\n", "", end)
    return replace(as_json, tail=f"</{_DSML}invoke>\n", tags=tags, as_json=as_json)


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
        ToolFormat(
            "glm47",
            "<tool_call>",
            ("<tool_call>", ""),
            "</tool_call>",
            "",
            "\n",
            tags=ArgumentTags(("<arg_key>", "</arg_key><arg_value>"), "</arg_value>"),
            as_json=HERMES_FORMAT,
        ),
        replace(
            _SEED_JSON,
            head=("<seed:tool_call>\n<function=", ">\n"),
            tail="</function>\n</seed:tool_call>",
            tags=ArgumentTags(("<parameter=", ">"), "</parameter>\n"),
            as_json=_SEED_JSON,
        ),
        replace(
            _GEMMA_JSON,
            head=("<|tool_call>call:", "{"),
            tail="}<tool_call|>",
            tags=ArgumentTags(("", ":"), '<|"|>', ",", '<|"|>'),
            as_json=_GEMMA_JSON,
        ),
        *(replace(each, head=("", "("), tags=_PYTHON_TAGS, as_json=each) for each in (_PYTHON_JSON, _LFM_JSON)),
        ToolFormat(
            "kimi_k2",
            "<|tool_calls_section_begin|>",
            ("<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>"),
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "",
            "<|tool_calls_section_end|>",
            numbered=True,
        ),
        replace(_OLMO_JSON, head=("", "("), tags=ArgumentTags(("", "="), "", ", "), as_json=_OLMO_JSON),
        ToolFormat("granite", "<|tool_call|>", _JSON_HEAD, "}", "<|tool_call|>[", ", ", "]"),
        ToolFormat("phi4_mini", "<|tool_call|>", _JSON_HEAD, "}", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
        ToolFormat("functools", "functools[", _JSON_HEAD, "}", "functools[", ", ", "]"),
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
        _dsml("deepseek_v32", "function_calls"),
        _dsml("deepseek_v4", "tool_calls"),
        ToolFormat(
            "harmony",
            "<|channel|>commentary to=functions.",
            ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
            "",
            alone=True,
        ),
        ToolFormat("functionary", "<function=", ("<function=", ">"), "</function>"),
        JSON_FORMAT,
    )
}
FORMAT_NAMES = tuple(_FORMATS)

# Each format, and what the source of a template must have, or must not have, to be of it; the first that fits is taken.
_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", (_CALLS, "```json"), ()),
    ("deepseek_v31", (_CALLS,), ()),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), ()),
    ("glm47", ("<tool_call>", "</arg_key><arg_value>"), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("seed_oss", ("<seed:tool_call>", "<parameter="), ()),
    ("gemma4", ("<|tool_call>", "call:"), ()),
    ("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), ()),
    ("deepseek_v32", (_DSML, "function_calls"), ()),
    ("deepseek_v4", (_DSML, "tool_calls"), ()),
    ("granite", ("<|tool_call|>",), ("<|/tool_call|>",)),
    ("functools", ("functools[",), ()),
    ("phi4_mini", ("<|tool|>", "<|/tool|>"), ()),
    ("olmo3", ("<function_calls>",), ()),
    ("lfm2", ("<|tool_list_start|>",), ()),
    ("lfm2", ("<|tool_call_start|>",), ()),
    ("pythonic", ("[func_name1(",), ()),
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
