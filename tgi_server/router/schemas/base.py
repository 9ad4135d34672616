"""Base classes and types of all bodies."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from msgspec import Meta, Struct
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from tgi_server.router.options import Dialect, OptionRow, fault_of, rows

NOT_EMPTY: dict[str, JsonValue] = {"minLength": 1}
SEVERAL: dict[str, JsonValue] = {"minItems": 1}

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

# Numbers that fit into the messages to the shards (proto/generate.proto).
UnsignedInt = Annotated[int, Field(ge=0, le=2**32 - 1)]
# A list of a bounded length. Its first wrong item is the one that is reported: there may be as many as a body can hold.
Items = Annotated[list[T], Field(max_length=10_000, fail_fast=True)]


Name = Annotated[str, Field(max_length=256)]

# Switches of OpenAI's routes, for which clients send null as well, which means that they are not set.
Off = Annotated[
    bool, BeforeValidator(lambda value: False if value is None else value, json_schema_input_type=bool | None)
]
On = Annotated[
    bool, BeforeValidator(lambda value: True if value is None else value, json_schema_input_type=bool | None)
]


def _read_schema(schema: Any) -> Any:
    try:
        schema = from_json(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ValueError(f"the JSON schema of the arguments is not JSON: {error}") from None
    return {} if schema is True else schema


# The JSON schema of a tool's arguments, as a grammar may have it: an object, `true`, or a string of JSON.
ToolSchema = Annotated[Any, AfterValidator(_read_schema)]


def _by_token_id(biases: Any) -> Any:
    return {str(token): bias for token, bias in enumerate(biases) if bias != 0} if isinstance(biases, list) else biases


def _one_or_several(texts: Any) -> Any:
    return [texts] if isinstance(texts, str) else texts


def _bounded(row: OptionRow, number: type) -> Any:
    """Returns the type of a number within the bounds of an option."""

    def check(value: float) -> float:
        if fault := fault_of(row.bounds, value):
            raise PydanticCustomError("bound", "must be {bound}", {"bound": fault})
        return value

    keywords = {"least": "minimum", "above": "exclusiveMinimum", "most": "maximum", "below": "exclusiveMaximum"}
    bounds = {name: bound for side, name in keywords.items() if (bound := getattr(row.bounds, side)) is not None}
    return Annotated[number, AfterValidator(check), Field(json_schema_extra=bounds)]


def _type(row: OptionRow, dialect: Dialect) -> Any:
    """Returns the type that the fields of an option have in a request; null leaves it out."""
    if row.type in (int, float):
        return _bounded(row, row.type) | None
    if row.type == int | None:
        return _bounded(row, int) | None
    if row.type is bool:
        return bool | None
    if row.type == dict[int, float]:
        biases: Any = dict.__class_getitem__((str, _bounded(row, float)))
        biases = Annotated[biases, Field(max_length=1024, fail_fast=True)] | None
        as_list = BeforeValidator(_by_token_id, json_schema_input_type=dict[str, float] | list[float] | None)
        return Annotated[biases, as_list]
    if row.type == tuple[int, ...]:
        return Annotated[list[UnsignedInt], Field(max_length=1024, fail_fast=True)] | None
    if row.type == tuple[str, ...]:
        if dialect in (Dialect.TGI, Dialect.MESSAGES):
            return Items[str] | None
        as_one = BeforeValidator(_one_or_several, json_schema_input_type=str | Items[str] | None)
        return Annotated[Items[str] | None, as_one]
    least, most = row.bounds.least, row.bounds.most
    length = Field(min_length=None if least is None else int(least), max_length=None if most is None else int(most))
    return Annotated[str, length] | None


def takes_options(dialect: Dialect) -> Callable[[type[M]], type[M]]:
    """Adds the fields of all options to the body of a request, as an interface has them."""

    def extended(model: type[M]) -> type[M]:
        more: dict[str, Any] = {}
        for row in rows(dialect):
            example: Any = {} if row.example is None else {"example": row.example}
            for name in row.names:
                shown = Field(default=None, description=row.description, json_schema_extra=example)
                more[name] = (_type(row, dialect), shown)
        made: type[M] = create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **more
        )
        return made

    return extended


class RequestModel(BaseModel):
    """The JSON of a request. Types are strict ("20" is not 20).

    Unknown fields are ignored, as in TGI, and reported to the client (`unknown_fields`). harmless: fields that are
    ignored without a report, for they say something about a request and never change its response.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    harmless: ClassVar[frozenset[str]] = frozenset()


class RefusingModel(RequestModel):
    """A request's JSON with fields that are refused by name.

    refused: fields that would change the answer and are not supported, with the values of them that ask for nothing.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name in cls.refused.keys() & body.keys():
                if body[name] is not None and body[name] not in cls.refused[name]:
                    raise ValueError(f"`{name}` is not supported here; leave it out")
        return body


def unknown_fields(model: type[BaseModel], content: Any, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Yields the unknown fields of a request, each with the name that was probably meant.

    Fields of nested objects have dotted names. Objects in lists, such as messages, may have fields of any name.
    """
    if not isinstance(content, dict):
        return
    fields, nested = _fields(model)
    for name, value in content.items():
        if name in nested:
            yield from unknown_fields(nested[name], value, f"{prefix}{name}.")
        elif name not in fields:
            yield f"{prefix}{name}", _meant(name, fields, nested, prefix)


def _meant(name: str, fields: frozenset[str], nested: Mapping[str, type[BaseModel]], prefix: str) -> str | None:
    inside = {inner: f"{outer}.{inner}" for outer, model in nested.items() for inner in model.model_fields}
    near = [name] if name in inside else get_close_matches(name[:100], [*fields, *inside], 1, cutoff=0.75)
    return f"{prefix}{inside.get(near[0], near[0]) if near[0] not in fields else near[0]}" if near else None


@cache
def _fields(model: type[BaseModel]) -> tuple[frozenset[str], Mapping[str, type[BaseModel]]]:
    """Returns the names of all known fields, and the models of those that are objects."""
    names = {field.alias or name: field for name, field in model.model_fields.items()}
    nested = {
        name: inner
        for name, field in names.items()
        for inner in (field.annotation, *get_args(field.annotation))
        if isinstance(inner, type) and issubclass(inner, RequestModel)
    }
    more = (*getattr(model, "refused", ()), *getattr(model, "harmless", ()))
    return frozenset([*names, *more]), nested


class ResponseModel(Struct, forbid_unknown_fields=True):
    """An object of a response: it is sent, and it documents what is sent. UNSET leaves a member out."""


def one_of(*models: type[ResponseModel]) -> Meta:
    """Returns the documentation of a member that is one of these objects."""
    return Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]})


class ErrorResponse(ResponseModel, kw_only=True):
    error: str
    error_type: str
