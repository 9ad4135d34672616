"""Unions in request bodies: of their members, the one that was sent is chosen, and only its faults are reported."""

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, GetCoreSchemaHandler, RootModel
from pydantic_core import CoreSchema, core_schema

# The type of the error of a value that is not a member. Its context has what was expected.
NO_MEMBER = "no_member"

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
            custom_error_type=NO_MEMBER,
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
