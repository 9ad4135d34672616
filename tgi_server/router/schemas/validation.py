"""The validator of all request bodies. It names a field by the path that the client sent: `messages[0].content`.

Of the members of a union, the one that was sent is chosen, and only its faults are reported.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, reduce
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, GetCoreSchemaHandler, RootModel, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from shared.logging import one_line
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.base import LeftOut, RequestModel, models_of

M = TypeVar("M", bound=BaseModel)

_MOST_FAULTS = 10
_LONGEST_NAME = 80
_LONGEST_NUMBER = 40
# Of an object in which a field is missing: fields that may be a misspelled form of it.
_MOST_NAMES = 100
_LONGEST_FAULT = 200
_JSON_TYPES = dict.fromkeys(("model_type", "dict_type"), "Input should be an object")
_MARK = re.compile(r"<\d+>|\[key\]")
_BOUNDS = {"le": "at most", "lt": "less than", "ge": "at least", "gt": "greater than"}
# The type of the error of a value that is not a member. Its context has what was expected.
_NO_MEMBER = "no_member"
_KINDS = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


class _ByType:
    """Annotates a union whose members differ in their JSON type, and objects in their `type`.

    An object without a `type` is the member that needs none; of several, the one whose required fields it has. One of
    an unknown type is the member whose `type` may be any string.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = {f"<{index}>": each for index, each in enumerate(get_args(source)) if each is not NoneType}
        choice = _Choice(members)
        union = core_schema.tagged_union_schema(
            {tag: handler.generate_schema(member) for tag, member in members.items()},
            choice.tag_of,
            custom_error_type=_NO_MEMBER,
            custom_error_message="must be {kinds}",
            custom_error_context=choice.expected,
        )
        return core_schema.nullable_schema(union) if NoneType in get_args(source) else union


BY_TYPE = _ByType()


class _Choice:
    """The choice among the members of a union, each with a tag."""

    def __init__(self, members: dict[str, Any]) -> None:
        self._kinds: dict[type, str] = {}
        self._types: dict[str, str] = {}
        self._other: str | None = None
        self._offered: list[str] = []
        untyped: dict[str, frozenset[str]] = {}
        for tag, member in members.items():
            for leaf in leaves(member):
                self._kinds.setdefault(leaf, tag)
                if not issubclass(leaf, BaseModel) or issubclass(leaf, RootModel):
                    continue
                self._kinds[dict] = tag
                kind = leaf.model_fields.get("type")
                if kind is None or not kind.is_required():
                    untyped[tag] = frozenset(_required(leaf))
                if kind is not None:
                    types = literals(kind.annotation)
                    self._types |= dict.fromkeys(types, tag)
                    self._offered += types if getattr(leaf, "is_supported", True) else ()
                    self._other = self._other if types else tag
        common = frozenset.intersection(*untyped.values()) if len(untyped) > 1 else frozenset()
        self._untyped = {tag: required - common for tag, required in untyped.items()}

    def tag_of(self, value: Any) -> str | None:
        """Returns the tag of the member that a value is; None if it is not a member."""
        typed = self._types or self._other
        if not isinstance(value, dict) or not (typed or self._untyped):
            return self._kinds.get(type(value))
        kind = value.get("type")
        if typed and kind is not None:
            return self._types.get(kind, self._other) if isinstance(kind, str) else None
        if len(self._untyped) == 1:
            return next(iter(self._untyped))
        given = {name for name, each in value.items() if each is not None}
        return next((tag for tag, required in self._untyped.items() if required & given), None)

    @property
    def expected(self) -> dict[str, Any]:
        """Returns the context of the error: JSON types, the objects' `type`s, and the fields of those without one."""
        fields = [name for required in self._untyped.values() for name in sorted(required)]
        return {
            "kinds": _listed(dict.fromkeys(_KINDS[kind] for kind in self._kinds if kind in _KINDS)),
            "types": _listed(f"`{kind}`" for kind in self._offered),
            "fields": _listed(f"`{name}`" for name in fields),
        }


def leaves(annotation: Any) -> Iterator[type]:
    """Yields the classes of the values that an annotation allows, with a root model before those in it."""
    if get_origin(annotation) is Annotated:
        yield from leaves(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from leaves(member)
    elif get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif isinstance(kind := get_origin(annotation) or annotation, type):
        yield kind
        if issubclass(kind, RootModel):
            yield from leaves(kind.model_fields["root"].annotation)


def literals(annotation: Any) -> Sequence[str]:
    """Returns the values that an annotation names."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return [value for inner in get_args(annotation) for value in literals(inner)]


def json_names(model: type[BaseModel]) -> dict[str, str]:
    """Returns the attribute of each field of a model, by all names that the field has in JSON."""
    return {
        str(each): name
        for name, field in model.model_fields.items()
        for alias in [field.validation_alias]
        for each in (alias.choices if isinstance(alias, AliasChoices) else (alias or name,))
    }


def _required(model: type[BaseModel]) -> Iterator[str]:
    return (name for name, attribute in json_names(model).items() if model.model_fields[attribute].is_required())


def _listed(names: Any) -> str:
    *first, last = [*names] or [""]
    return f"{', '.join(first)} or {last}" if first else last


def validate(model: type[M], content: Any) -> M:
    """Returns the content of a body as `model`. Raises InvalidRequest with one line for what is wrong."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _refusal(error) from None


@dataclass(frozen=True, slots=True)
class Ignored:
    """A member of a request that has no effect. fault: why, as a refusal says it. note: the same in short."""

    path: str
    fault: str
    note: str


def ignored(value: Any, content: Any, path: str = "") -> Iterator[Ignored]:
    """Yields the members of a request that have no effect: unknown fields, and objects of types that are left out.

    value: the parsed value of `content`, the JSON at `path`. Free JSON, such as `metadata`, is not searched.
    """
    if isinstance(value, RootModel):
        yield from ignored(value.root, content, path)
    elif isinstance(value, LeftOut):
        kind = one_line(value.type, _LONGEST_NAME)
        yield Ignored(path, f"has the type {kind!r}, which is not supported here", kind)
    elif isinstance(value, RequestModel) and isinstance(content, dict):
        members = _members(type(value))
        for name, item in content.items():
            own = _child(path, name)
            if name in value.reported:
                yield Ignored(own, "has no effect here", "")
            elif name in members.with_objects:
                yield from ignored(getattr(value, members.with_objects[name]), item, own)
            elif name not in members.names and item is not None:
                meant = (near := members.meant(name)) and _child(path, near)
                hint = f"; did you mean `{meant}`?" if meant else ""
                note = f"did you mean {meant}?" if meant else ""
                yield Ignored(own, f"is not a field of this request{hint}", note)
    elif isinstance(value, list) and isinstance(content, list):
        for index, (each, item) in enumerate(zip(value, content, strict=False)):
            yield from ignored(each, item, _child(path, index))
    elif isinstance(value, dict) and isinstance(content, dict):
        for name, each in value.items():
            yield from ignored(each, content.get(name), _child(path, name))


@dataclass(frozen=True, slots=True)
class _Members:
    """The names that fields of a model have in JSON. with_objects: the attributes of fields in which objects may be.
    nested: their own fields, by the names of these.
    """

    names: frozenset[str]
    with_objects: Mapping[str, str]
    nested: Mapping[str, str]

    def meant(self, name: str) -> str | None:
        """Returns the field that was probably meant by an unknown one."""
        if name in self.nested:
            return self.nested[name]
        near = _nearest(name[:_LONGEST_NAME], [*self.names, *self.nested])
        return next((each if each in self.names else self.nested[each] for each in near), None)


@cache
def _members(model: type[RequestModel]) -> _Members:
    fields = {name: (attribute, model.model_fields[attribute]) for name, attribute in json_names(model).items()}
    objects = {name: found for name, (_, field) in fields.items() if (found := models_of(field.annotation))}
    alone = {name: found for name, found in objects.items() if not {list, dict} & {*leaves(fields[name][1].annotation)}}
    return _Members(
        frozenset([*fields, *getattr(model, "refused", ()), *model.harmless]),
        {name: fields[name][0] for name in objects},
        {inner: f"{name}.{inner}" for name, found in alone.items() for each in found for inner in json_names(each)},
    )


def _nearest(name: str, names: Sequence[str]) -> Sequence[str]:
    """Returns the most similar one of some names, as a list; an empty list if none is similar."""
    return get_close_matches(name, names, 1, cutoff=0.75)


def _refusal(error: ValidationError) -> InvalidRequest:
    """Returns the error of a request's JSON, in one line. Of the client's values it repeats only numbers."""
    faults: dict[str, None] = {}
    first = None
    for detail in error.errors(include_url=False):
        if len(faults) == _MOST_FAULTS:
            faults["and more"] = None
            break
        path, fault = _fault(detail)
        first = path if first is None else first
        faults[f"`{path}`{fault}" if path else f"the request{fault}"] = None
    return InvalidRequest("; ".join(faults), first)


def _fault(detail: ErrorDetails) -> tuple[str, str]:
    """Returns the path of a fault, and the fault in words."""
    context, given, parts = detail.get("ctx", {}), detail["input"], list(detail["loc"])
    bound = next(
        (f"{words} {context[name]}" for name, words in _BOUNDS.items() if name in context), context.get("bound")
    )
    message = _JSON_TYPES.get(detail["type"], detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == _NO_MEMBER and isinstance(given, dict):
        if context["types"]:
            parts.append("type")
            message = "Field required" if given.get("type") is None else f"must be {context['types']}"
        else:
            message = f"needs {context['fields']}"
    elif detail["type"] == "missing":
        names = [name for name in islice(given, _MOST_NAMES) if len(name) <= _LONGEST_NAME]
        message += "".join(f", not `{one_line(near, _LONGEST_NAME)}`" for near in _nearest(str(parts[-1]), names))
    elif bound is not None:
        message = f"is {one_line(str(given), _LONGEST_NUMBER)}; it must be {bound}"
    path = _path([*parts, *context.get("field", ())])
    verb = message.startswith(("must ", "needs ", "is ", "has "))
    return path, f"{' ' if verb else ': '}{one_line(message, _LONGEST_FAULT)}"


def _path(location: Iterable[int | str]) -> str:
    """Returns the path of a location, without the tags of unions (`<0>`) and pydantic's marks (`[key]`)."""
    return reduce(_child, (part for part in location if not (isinstance(part, str) and _MARK.fullmatch(part))), "")


def _child(path: str, part: int | str) -> str:
    """Returns the path of an item of a list, or of a member of an object."""
    return f"{path}[{part}]" if isinstance(part, int) else f"{path}{path and '.'}{one_line(part, _LONGEST_NAME)}"
