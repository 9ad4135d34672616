"""Compares the request types of a client's SDK with the models of this server's requests.

An SDK describes a request by TypedDicts. Every field of them, every member of a union and every value of a list of
values must be decided here: read by a model of `tgi_server/router/schemas`, `harmless` or `refused` there, or a type
that is refused or left out as a whole.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, RootModel
from typing_extensions import is_typeddict

from tgi_server.router.schemas.base import LeftOut, Refused, RequestModel, models_of
from tgi_server.router.schemas.validation import json_names
from tools.members import known_types

# Fields that tell the members of a union apart.
_TAGS = ("type", "role", "mode")


def undecided(sdk_type: Any, model: type[BaseModel]) -> list[str]:
    """Returns the members of an SDK's request type about which a model says nothing, as paths with types in brackets:
    `messages[user].content[video]`.
    """
    return list(dict.fromkeys(_in_object(sdk_type, model, "", set())))


def _in_object(sdk_type: Any, model: type[BaseModel], path: str, seen: set[Any]) -> Iterator[str]:
    if (sdk_type, model) in seen:
        return
    seen.add((sdk_type, model))
    fields = _fields(model)
    decided = {name for kind in ("harmless", "reported", "refused") for name in getattr(model, kind, ())}
    for name, annotation in get_type_hints(sdk_type).items():
        member = f"{path}.{name}" if path else name
        if name in fields:
            yield from _in_field(annotation, fields[name], member, seen)
        elif name not in decided:
            yield member


def _in_field(annotation: Any, ours: Any, path: str, seen: set[Any]) -> Iterator[str]:
    leaves = set(_leaves(ours))
    if leaves & {Any, dict, object}:
        return
    models = models_of(ours)
    values = {value for leaf in leaves if get_origin(leaf) is Literal for value in get_args(leaf)}
    for leaf in _leaves(annotation):
        if is_typeddict(leaf):
            yield from _in_member(leaf, models, path, seen)
        elif get_origin(leaf) is Literal and str not in leaves:
            yield from (f"{path}={value}" for value in get_args(leaf) if isinstance(value, str) and value not in values)


def _in_member(sdk_type: Any, models: tuple[type[RequestModel], ...], path: str, seen: set[Any]) -> Iterator[str]:
    tags = _tags(sdk_type)
    for tag in tags or ("",):
        own = f"{path}[{tag}]" if tag else path
        matching = [model for model in models if not tag or (types := known_types(model)) is None or tag in types]
        if not matching:
            yield own
        elif not any(issubclass(model, Refused | LeftOut) for model in matching):
            found = [list(_in_object(sdk_type, model, own, seen)) for model in matching]
            yield from min(found, key=len)


def _tags(sdk_type: Any) -> tuple[str, ...]:
    hints = get_type_hints(sdk_type)
    for name in _TAGS:
        values = [value for leaf in _leaves(hints.get(name)) if get_origin(leaf) is Literal for value in get_args(leaf)]
        if values:
            return tuple(values)
    return ()


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yields the types of values in an annotation, without unions, lists and root models around them."""
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        yield from _leaves(annotation.model_fields["root"].annotation)
    elif get_origin(annotation) in (Literal, dict):
        yield annotation if get_origin(annotation) is Literal else dict
    elif inner := get_args(annotation):
        for each in inner:
            yield from _leaves(each)
    else:
        yield annotation


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the annotations of a model's fields by all their names in JSON."""
    return {name: model.model_fields[attribute].annotation for name, attribute in json_names(model).items()}
