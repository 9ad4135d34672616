"""Lists the calls that a chat template may make, and the maximum number of characters that each call builds.

All other calls are refused: Jinja and Python have many methods and filters that no chat template needs, and some of
them can take hours or gigabytes.
"""

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Joiner

from tgi_server.router.text.template_allowance import MEMBER, Allowance

BITS = 4_096
WIDEST = 100_000
DEEPEST_INDENT = 100
_MOST_DIGITS = 100
# Maximum of (characters of a text) * (characters that are searched for), for methods that take as many steps.
_STEPS = 2**28
# A text of one character takes as much memory as this many characters of a long text.
_SHORT_TEXT = 16
_DIGITS = re.compile(r"\d+")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# A width that is itself a replacement field.
_CHOSEN_WIDTH = re.compile(r"\{[^{}]*\{")
_NO_WIDTH = "the template computes the width of a text; use a constant"

# Calls that run a part of the template.
NESTING = (Macro, LoopContext, BlockReference)
_SPLITTING = frozenset({"split", "rsplit", "splitlines", "title"})
_SEARCHING = frozenset(
    {
        *("strip", "lstrip", "rstrip", "trim", "removeprefix", "removesuffix", "startswith", "endswith"),
        *("rfind", "rindex", "rsplit", "rpartition"),
    }
)
_RECASING = frozenset({"upper", "lower", "title", "capitalize", "swapcase", "casefold"})
# Methods of texts that do not return a text.
_READING = frozenset(
    {
        *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
        *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"),
        *("isprintable", "isspace", "istitle", "isupper"),
    }
)
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        {
            *(_READING | _RECASING | _SEARCHING | _SPLITTING),
            *("center", "expandtabs", "format", "format_map", "join", "ljust", "partition", "replace", "rjust"),
            *("translate", "zfill"),
        }
    ),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    Cycler: frozenset({"next", "reset"}),
    LoopContext: frozenset({"changed", "cycle"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
}
# Filters that look only at a value and its type, or yield its members one by one.
CHEAP_FILTERS = frozenset(
    {
        *("abs", "attr", "count", "d", "default", "first", "last", "length"),
        *("map", "reject", "rejectattr", "select", "selectattr"),
    }
)
# Filters that compare the members of a list, or build another list of them.
LISTING_FILTERS = frozenset(
    {
        *("batch", "dictsort", "groupby", "items", "list", "max", "min", "random", "reverse", "slice", "sort", "sum"),
        "unique",
    }
)
# Filters that return a text or a number.
TEXT_FILTERS = frozenset(
    {
        *("capitalize", "center", "e", "escape", "filesizeformat", "float", "format", "indent", "int", "join", "lower"),
        *("replace", "round", "safe", "string", "title", "tojson", "trim", "truncate", "upper"),
    }
)
COMPARING_TESTS = frozenset(
    {
        *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge"),
        "in",
    }
)


def owner_of(called: Any) -> Any:
    """Returns the value whose method is called; None for a function."""
    return getattr(getattr(called, "__wrapped__", called), "__self__", None)


def check_callable(called: Any, functions: frozenset[int]) -> None:
    """Raises TemplateError if a template may not call `called`. functions: ids of allowed functions."""
    if isinstance(called, (*NESTING, Joiner, Undefined)) or id(called) in functions:
        return
    name = getattr(called, "__name__", type(called).__name__)
    owner = owner_of(called)
    kinds = [kind for kind in _METHODS if isinstance(owner, kind)]
    if not any(name in _METHODS[kind] for kind in kinds):
        of = f" of {type(owner).__name__}" if kinds else ""
        raise TemplateError(f"the template calls `{name}`{of}, which is not allowed")


def result_size(allowance: Allowance, operator: str, left: Any, right: Any) -> int:
    """Returns the maximum characters that a binary operation builds. Raises TemplateError if numbers are too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > BITS:
            raise TemplateError(f"the template computes a number of more than {BITS} bits")
        return 0
    if operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        return _length(sequence) * max(int(times), 0)
    if operator == "%" and isinstance(left, str):
        if "*" in left:
            raise TemplateError(_NO_WIDTH)
        return _format_size(allowance, left, right if isinstance(right, tuple) else (right,), {})
    return _length(left) + _length(right) if operator == "+" else 0


def text_size(allowance: Allowance, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Returns the maximum number of characters that a method or filter of a text builds. Raises TemplateError."""
    given = (*args, *kwargs.values())
    widest = check_widths(args, kwargs)
    longest = sum(len(each) for each in given if isinstance(each, str))
    if name in _SEARCHING and sum(map(_length, given)) * len(text) > _STEPS:
        raise TemplateError(f"the template searches a text of {len(text)} characters for one that is too long")
    if name in ("int", "float") and len(text) > BITS:
        raise TemplateError(f"the template reads a number of {len(text)} digits; at most {BITS} are allowed")
    if name in _READING:
        return 0
    if name == "replace":
        old = str(args[0] if args else kwargs.get("old", ""))
        new = args[1] if len(args) > 1 else kwargs.get("new", "")
        return len(text) + text.count(old) * len(str(new))
    if name == "join" and args:
        return joined_size(allowance, args[0], text)
    if name == "translate" and args:
        return len(text) * max((1, *map(_length, _values(args[0]))))
    if name in ("format", "format_map"):
        return _format_size(allowance, text, args, kwargs)
    if name in ("tojson", "e", "escape"):
        return allowance.expanded(text)
    if name in _SPLITTING:
        return len(text) * (3 if name in _RECASING else 1) + _SHORT_TEXT * _pieces(text, name, args)
    if name in ("indent", "expandtabs"):
        lines = 1 + sum(map(text.count, _LINE_ENDS)) + text.count("\t")
        return len(text) + lines * (widest + longest)
    return len(text) * (3 if name in _RECASING else 1) + widest + longest


def joined_size(allowance: Allowance, members: Any, joint: Any) -> int:
    """Returns the maximum number of characters of a list's members joined to one text."""
    sizes = (len(member) if isinstance(member, str) else allowance.expanded(member) for member in members)
    return sum(sizes) + len(str(joint)) * _length(members)


def check_widths(args: tuple[Any, ...], kwargs: Mapping[str, Any], most: int = WIDEST) -> int:
    """Returns the largest number among the arguments. Raises TemplateError if it is larger than `most`."""
    given = [
        len(each) if most == DEEPEST_INDENT and isinstance(each, str) else each for each in (*args, *kwargs.values())
    ]
    widest = max((each for each in given if isinstance(each, int)), default=0)
    if widest > most:
        raise TemplateError(f"the template uses a text width of {widest}; at most {most} is allowed")
    return max(widest, 0)


def check_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises TemplateError for arguments with which a filter would take too long."""
    check_widths(args, kwargs, {"tojson": DEEPEST_INDENT, "round": _MOST_DIGITS}.get(name, WIDEST))
    start = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if name == "sum" and not isinstance(start, int | float):
        raise TemplateError("the template's `sum` may only add numbers")


def _format_size(allowance: Allowance, form: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    if _CHOSEN_WIDTH.search(form):
        raise TemplateError(_NO_WIDTH)
    widths = [len(each) for each in _DIGITS.findall(form)]
    widest = 10 ** min(max(widths, default=0), 12)
    values = [value for each in (*args, kwargs) for value in (each.values() if isinstance(each, Mapping) else [each])]
    longest = max(map(allowance.expanded, values), default=0)
    return len(form) + (form.count("%") + form.count("{")) * (longest + widest)


def _pieces(text: str, name: str, args: tuple[Any, ...]) -> int:
    """Returns the maximum number of pieces into which a text is split."""
    if name == "splitlines":
        return 1 + sum(map(text.count, _LINE_ENDS))
    separator = args[0] if args else None
    most = len(text) // 2 + 1 if not isinstance(separator, str) else text.count(separator) + 1 if separator else 1
    limit = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
    return most if limit < 0 else min(most, limit + 1)


def _length(value: Any) -> int:
    """Returns the number of characters of a text, or those for which the members of a list count."""
    if isinstance(value, str):
        return len(value)
    return MEMBER * len(value) if hasattr(value, "__len__") else 0


def _values(table: Any) -> list[Any]:
    return list(table.values() if isinstance(table, Mapping) else table)
