"""A Jinja sandbox that bounds the time and the memory of chat templates.

Clients decide how often a template loops, and templates come from strangers: `2 ** 9 ** 9` would take hours, and
`'a' * 9 ** 9` gigabytes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from sys import getsizeof
from time import monotonic
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Seconds that the loops of a template may take, and bytes of all texts and lists that it builds.
RENDER_SECONDS = 5.0
_BYTES = 2**28
_BITS = 4_096
_WIDEST = 100_000
_DEEPEST_INDENT = 100
# Bytes of a member of a list.
_MEMBER = 256
_DIGITS = re.compile(r"\d+")
# A width that is a replacement field itself.
_CHOSEN_WIDTH = re.compile(r"\{[^{}]*\{")
# Filters, and methods of texts, that can make a text longer; no other can.
_FILTERS = (
    "batch",
    "center",
    "format",
    "indent",
    "join",
    "replace",
    "slice",
    "string",
    "tojson",
    "truncate",
    "wordwrap",
)
_NO_WIDTH = "the template computes the width of a text; use a constant"
# The template variable that holds the allowance of a rendering.
ALLOWANCE = "_allowance"


class Allowance:
    """The time and the memory that one rendering has left."""

    def __init__(self, size: int = _BYTES) -> None:
        """size: bytes that the template may build."""
        self._deadline = monotonic() + RENDER_SECONDS
        self._size = self._bytes = size

    def check_time(self) -> None:
        """Raises TemplateError once the time is over."""
        if monotonic() > self._deadline:
            raise TemplateError(f"rendering takes more than {RENDER_SECONDS} s; send fewer or shorter messages")

    def take(self, size: int) -> None:
        """Counts bytes before they are built. Raises TemplateError beyond the limit."""
        self._bytes -= size
        if self._bytes < 0:
            raise TemplateError(f"the template builds more than {self._size} bytes of text")

    def take_members(self, value: Any) -> None:
        """Counts the bytes that a list takes as text; it may contain other lists many times."""
        left = [] if isinstance(value, str) else [value]
        while left:
            each = left.pop()
            members = each.values() if isinstance(each, Mapping) else each if isinstance(each, list | tuple) else ()
            self.take(_MEMBER * len(members))
            left.extend(members)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that checks the size of texts, lists and numbers before an operation builds them."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        self.code_generator_class = _CodeGenerator
        self.filters["in_time"] = _in_time
        del self.globals["lipsum"]

    def bound_filters(self) -> None:
        """Bounds the filters that are defined by now."""
        for name in _FILTERS:
            self.filters[f"unbounded_{name}"] = self.filters[name]
            self.filters[name] = _bounded(name)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "in_time", [], [], None, None, lineno=loop.lineno)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        context[ALLOWANCE].take(_result_size(context[ALLOWANCE], operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str):
            context[ALLOWANCE].take(_text_size(context[ALLOWANCE], obj.__name__, owner, args, kwargs))
        return super().call(context, obj, *args, **kwargs)

    def concatenated(self, context: Context, parts: Iterable[Any]) -> str:
        """Returns the parts concatenated, as `~` does."""
        texts = [str(_shown(context, part)) for part in parts]
        context[ALLOWANCE].take(sum(map(getsizeof, texts)))
        return "".join(texts)


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # jinja2 names it so
        self.write("environment.concatenated(context, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


@pass_context
def _shown(context: Context, value: Any) -> Any:
    """Returns the value that the template writes. Raises TemplateError if it is too large."""
    context[ALLOWANCE].take_members(value)
    return value


@pass_context
def _in_time(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a loop. Raises TemplateError once the time for rendering is over."""
    allowance: Allowance = context[ALLOWANCE]
    for item in items:
        allowance.check_time()
        yield item


def _bounded(name: str) -> Callable[..., Any]:
    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        allowance: Allowance = context[ALLOWANCE]
        if isinstance(value, str):
            allowance.take(_text_size(allowance, name, value, args, kwargs))
        else:
            value = list(value) if name == "join" else value
            allowance.take_members(value)
        if name == "join" and isinstance(value, list):
            joint = args[0] if args else kwargs.get("d", "")
            allowance.take(sum(map(getsizeof, value)) + getsizeof(joint) * len(value))
        _check_widths(args, kwargs, _DEEPEST_INDENT if name == "tojson" else _WIDEST)
        return context.environment.call_filter(f"unbounded_{name}", value, args, kwargs, context)

    return bounded


def _result_size(allowance: Allowance, operator: str, left: Any, right: Any) -> int:
    """Returns the bytes that an operation may take. Raises TemplateError for numbers that are too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _BITS and operator in ("*", "**"):
            raise TemplateError(f"the template computes a number of more than {_BITS} bits")
        return 0
    if operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        text, times = (right, left) if isinstance(left, int) else (left, right)
        return 0 if isinstance(text, float) else getsizeof(text) * max(int(times), 0)
    if operator == "%" and isinstance(left, str):
        if "*" in left:
            raise TemplateError(_NO_WIDTH)
        return _format_size(allowance, left, right if isinstance(right, tuple) else (right,), {})
    return getsizeof(left) + getsizeof(right) if operator == "+" else 0


def _text_size(allowance: Allowance, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Returns the most bytes that a method of a text, or a filter, may build. Raises TemplateError."""
    widest = _check_widths(args, kwargs)
    if name == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        return getsizeof(text) + text.count(old) * getsizeof(new)
    if name == "join" and args:
        return getsizeof(text) * _members(args[0]) + getsizeof(args[0])
    if name in ("format", "format_map"):
        return _format_size(allowance, text, args, kwargs)
    if name in ("indent", "expandtabs", "wordwrap"):
        return getsizeof(text) * (1 + widest) if "\n" in text or "\t" in text else getsizeof(text) + widest
    return getsizeof(text) + widest


def _check_widths(args: tuple[Any, ...], kwargs: Mapping[str, Any], most: int = _WIDEST) -> int:
    """Returns the largest of the numbers. Raises TemplateError for one that is too large for a width."""
    given = [
        len(each) if most == _DEEPEST_INDENT and isinstance(each, str) else each for each in (*args, *kwargs.values())
    ]
    widest = max((each for each in given if isinstance(each, int)), default=0)
    if widest > most:
        raise TemplateError(f"the template uses a text width of {widest}; at most {most} is allowed")
    return max(widest, 0)


def _format_size(allowance: Allowance, form: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    if _CHOSEN_WIDTH.search(form):
        raise TemplateError(_NO_WIDTH)
    widths = [len(each) for each in _DIGITS.findall(form)]
    widest = 10 ** min(max(widths, default=0), 12)
    values = [value for each in (*args, kwargs) for value in (each.values() if isinstance(each, Mapping) else [each])]
    for each in values:
        allowance.take_members(each)
    longest = max(map(getsizeof, values), default=0)
    return getsizeof(form) + (form.count("%") + form.count("{")) * (longest + widest)


def _members(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1
