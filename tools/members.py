"""Makes a table of the members of a request from the models of its body: read, ignored, refused or left out."""

from collections.abc import Iterable, Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tgi_server.router.schemas.base import LeftOut, Refused, RequestModel, models_of
from tgi_server.router.schemas.validation import json_names, literals

_HEAD = """| object | read | accepted without effect | left out, and reported | refused by name |
|---|---|---|---|---|
"""


def members_table(model: type[BaseModel], options: Iterable[str] = ()) -> str:
    """Returns the table of one request. options: names of fields that another table has."""
    hidden = frozenset(options)
    return _HEAD + "\n".join(f"| {' | '.join(row)} |" for row in _rows(model, "", hidden, set()))


def _rows(
    model: type[BaseModel], path: str, hidden: frozenset[str], seen: set[tuple[str, type[BaseModel]]]
) -> Iterator[tuple[str, ...]]:
    names = json_names(model).items()
    fields = {name: model.model_fields[attribute] for name, attribute in names if name not in hidden}
    refused, harmless, reported = (set(getattr(model, name, ())) for name in ("refused", "harmless", "reported"))
    refusing = {name: _types(field, Refused) for name, field in fields.items()}
    leaving = {name: _types(field, LeftOut) for name, field in fields.items()}
    yield (
        f"`{path}`" if path else "the request",
        _listed(fields),
        _listed(sorted(harmless)),
        _joined([_listed(sorted(reported)), *(_group(name, types) for name, types in leaving.items())]),
        _joined([_listed(sorted(refused)), *(_group(name, types) for name, types in refusing.items())]),
    )
    for name, field in fields.items():
        for inner in models_of(field.annotation):
            kinds = "" if "role" in inner.model_fields else ", ".join(sorted(known_types(inner) or ()))
            own = f"{name}[{kinds}]" if kinds else name
            if not issubclass(inner, Refused | LeftOut) and (own, inner) not in seen:
                seen.add((own, inner))
                yield from _rows(inner, f"{path}.{own}" if path else own, frozenset(), seen)


def known_types(model: type[RequestModel]) -> frozenset[str] | None:
    """Returns the values of a model's `type`, `role` or `mode`, or the types that it leaves out; None: it has none."""
    if issubclass(model, LeftOut):
        return model.known
    for name in ("type", "role", "mode"):
        if name in model.model_fields:
            return frozenset(literals(model.model_fields[name].annotation)) or None
    return None


def _types(field: FieldInfo, of: type[RequestModel]) -> list[str]:
    return sorted(
        kind for inner in models_of(field.annotation) if issubclass(inner, of) for kind in known_types(inner) or ()
    )


def _group(name: str, types: list[str]) -> str:
    """Returns the types of a field's objects."""
    return f"in `{name}`: {_listed(types)}" if types else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _joined(parts: Iterable[str]) -> str:
    return "; ".join(filter(None, parts))
