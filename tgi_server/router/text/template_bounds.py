"""A Jinja sandbox that limits the time and the memory of chat templates.

Clients' data determine how often a template loops, and templates come from strangers: `2 ** 9 ** 9` would take hours,
and `'a' * 9 ** 9` gigabytes. `template_calls` lists what a template may call. Each operation counts the characters that
it is about to build (`template_allowance`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import escape

from tgi_server.router.text.template_allowance import MEMBER, current_allowance
from tgi_server.router.text.template_calls import (
    CHEAP_FILTERS,
    COMPARING_TESTS,
    LISTING_FILTERS,
    NESTING,
    TEXT_FILTERS,
    check_callable,
    check_filter,
    joined_size,
    owner_of,
    result_size,
    text_size,
)

# Maximum characters of a template's source. Those of published models have at most about 20,000.
_LONGEST_SOURCE = 2**18
# Name of the filter that is added to loops.
_IN_TIME = "in time"
# For texts longer than this, the time is checked before a comparison.
_LONG = 10_000


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that checks the size of texts, lists and numbers before an operation builds them.

    Templates are rendered within `rendering(Allowance())`.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        self.code_generator_class = _CodeGenerator
        self._functions: frozenset[int] = frozenset()
        del self.globals["lipsum"]

    def bound(self) -> None:
        """Limits the filters, tests and functions defined so far, and removes those that templates do not need."""
        # In another environment, because `map` can call any filter of its environment by name.
        unbounded = ImmutableSandboxedEnvironment()
        unbounded.filters |= self.filters
        unbounded.filters |= {"e": _escaped, "escape": _escaped, "safe": str}
        names = CHEAP_FILTERS | LISTING_FILTERS | TEXT_FILTERS
        self.filters = {name: _bounded_filter(unbounded, name) for name in names}
        self.filters[_IN_TIME] = _in_time
        for name in COMPARING_TESTS:
            compared: Any = self.tests[name]
            self.tests[name] = _bounded_test(compared)
        self._functions = frozenset(map(id, self.globals.values()))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _LONGEST_SOURCE:
            raise TemplateSyntaxError(f"it has {len(source)} characters; at most {_LONGEST_SOURCE} are allowed", 1)
        tree = super()._parse(source, name, filename)
        for escaping in tree.find_all((nodes.EvalContextModifier, nodes.ScopedEvalContextModifier)):
            raise TemplateSyntaxError("chat templates cannot use `autoescape`", escaping.lineno)
        for loop in tree.find_all(nodes.For):
            # Each text that is written takes a place in a list, even if it is empty.
            outputs = nodes.Const(1 + sum(len(output.nodes) for output in loop.find_all(nodes.Output)))
            loop.iter = nodes.Filter(loop.iter, _IN_TIME, [outputs], [], None, None, lineno=loop.lineno)
        return tree

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Joins the texts that a template, a macro or a block wrote."""
        allowance = current_allowance()
        written = []
        for text in texts:
            allowance.take(len(text))
            written.append(text)
        return "".join(written)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        allowance = current_allowance()
        allowance.take(result_size(allowance, operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        allowance = current_allowance()
        check_callable(obj, self._functions)
        owner = owner_of(obj)
        if isinstance(owner, str):
            args = tuple(allowance.collected(each) if isinstance(each, Iterator) else each for each in args)
            allowance.take(text_size(allowance, obj.__name__, owner, args, kwargs))
        elif isinstance(obj, NESTING):
            allowance.take(0)
        else:
            for value in (owner, *args, *kwargs.values()):
                allowance.check_value(value)
            allowance.take(sum(MEMBER * len(each) for each in (owner, *args) if isinstance(each, list | dict)))
        with allowance.deeper() if isinstance(obj, NESTING) else nullcontext():
            return super().call(context, obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        current_allowance().check_value(argument)
        return super().getitem(obj, argument)

    def sliced(self, value: Any, part: slice) -> Any:
        """Returns a part of a text or a list."""
        if isinstance(value, str | list | tuple):
            size = len(range(*part.indices(len(value))))
            current_allowance().take(size if isinstance(value, str) else MEMBER * size)
        return value[part]

    def comparable(self, value: Any) -> Any:
        """Returns the value unchanged. Raises TemplateError if comparing it would take too long."""
        if isinstance(value, str):
            if len(value) > _LONG:
                current_allowance().check_time()
        else:
            current_allowance().check_value(value)
        return value

    def concatenated(self, parts: Iterable[Any]) -> str:
        """Joins the parts, as the operator `~` does."""
        return self.concat([str(_shown(part)) for part in parts])


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # jinja2 names it so
        self.write("environment.concatenated((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for each in (node.arg.start, node.arg.stop, node.arg.step):
            self.visit(each or nodes.Const(None), frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._compared(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {_OPERATORS[node.op]} ")
        self._compared(node.expr, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("{")
        for item in node.items:
            self._compared(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _compared(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.comparable(")
        self.visit(node, frame)
        self.write(")")


_OPERATORS: Mapping[str, str] = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


def _escaped(value: Any) -> str:
    return str(escape(value))


def _shown(value: Any) -> Any:
    """Returns a value that the template writes, unchanged. Raises TemplateError if it is too large."""
    if not isinstance(value, str):
        current_allowance().take_value(value)
    return value


@pass_context
def _in_time(context: Context, items: Iterable[Any], outputs: int) -> Iterator[Any]:
    """Yields the items of a loop, and counts each. outputs: maximum number of texts that the loop's body writes."""
    allowance = current_allowance()
    for item in items:
        allowance.take(MEMBER * outputs)
        yield item


def _bounded_filter(unbounded: Environment, name: str) -> Callable[..., Any]:
    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        allowance = current_allowance()
        allowance.check_time()
        if name in CHEAP_FILTERS:
            return unbounded.call_filter(name, value, args, kwargs, context)
        check_filter(name, args, kwargs)
        if isinstance(value, Iterator):
            value = allowance.collected(value)
        if name == "join":
            value = allowance.collected(value)
            allowance.take(joined_size(allowance, value, args[0] if args else kwargs.get("d", "")))
        elif isinstance(value, str):
            size = MEMBER * len(value) if name in LISTING_FILTERS else 0
            allowance.take(size + text_size(allowance, name, value, args, kwargs))
        elif name in LISTING_FILTERS:
            allowance.check_value(value)
            allowance.take(MEMBER * len(value) if hasattr(value, "__len__") else 0)
        else:
            allowance.take_value(value)
        return unbounded.call_filter(name, value, args, kwargs, context)

    return bounded


def _bounded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def bounded(context: Context, *values: Any) -> Any:
        for value in values:
            current_allowance().check_value(value)
        return function(*values)

    return bounded
