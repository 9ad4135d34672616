"""Base classes and types of all bodies."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from msgspec import Meta, Struct
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    RootModel,
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


def fault(text: str, *field: str) -> PydanticCustomError:
    """Returns the error of a validator. field: the member that is wrong, of an object that is validated as a whole."""
    return PydanticCustomError("fault", "{fault}", {"fault": text, "field": field})


def as_parts(content: Any) -> Any:
    """Returns content as a list of parts: a string is a text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _read_schema(schema: Any) -> Any:
    try:
        schema = from_json(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise fault(f"the JSON schema of the arguments is not JSON: {error}") from None
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
        if bound := fault_of(row.bounds, value):
            raise PydanticCustomError("bound", "must be {bound}", {"bound": bound})
        return value

    keywords = {"least": "minimum", "above": "exclusiveMinimum", "most": "maximum", "below": "exclusiveMaximum"}
    bounds = {name: bound for side, name in keywords.items() if (bound := getattr(row.bounds, side)) is not None}
    return Annotated[number, AfterValidator(check), Field(json_schema_extra=bounds)]


def _type(row: OptionRow, dialect: Dialect) -> Any:
    """Returns the type of an option's fields in a request; null means that the field is omitted."""
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


def takes_options(dialect: Dialect, *required: str) -> Callable[[type[M]], type[M]]:
    """Adds the fields of all options to the body of a request, as an interface has them."""

    def extended(model: type[M]) -> type[M]:
        more: dict[str, Any] = {}
        for row in rows(dialect):
            example: Any = {} if row.example is None else {"example": row.example}
            for name in row.names:
                default = ... if name in required else None
                shown = Field(default=default, description=row.description, json_schema_extra=example)
                more[name] = (_type(row, dialect), shown)
        made: type[M] = create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **more
        )
        return made

    return extended


class RequestModel(BaseModel):
    """The JSON of a request, or of an object in it. Types are strict ("20" is not 20). `null` omits a field.

    Unknown fields are ignored, as in TGI, and reported to the client (`validation.ignored`). harmless: fields that are
    ignored without a report, for they say something about a request and never change its response. reported: known
    fields without effect here, which are reported like unknown ones.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    harmless: ClassVar[frozenset[str]] = frozenset()
    reported: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        if isinstance(content, dict) and None in content.values():
            return {name: value for name, value in content.items() if value is not None}
        return content


class RefusingModel(RequestModel):
    """A request's JSON with fields that are refused by name.

    refused: fields that would change the answer and are not supported, with the values of them that ask for nothing.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if isinstance(body, dict) and not cls.refused.keys().isdisjoint(body):
            found = [name for name in cls.refused if body.get(name) not in (None, *cls.refused[name])]
            if len(found) == 1:
                raise fault("is not supported here; leave it out", found[0])
            if found:
                others = ", ".join(f"`{name}`" for name in found[1:])
                raise fault(f"is not supported here, nor {others}; leave them out", found[0])
        return body


class Refused(RequestModel):
    """An object whose type is known, and refused by name. Its field `type` is a Literal. reason: for the message."""

    is_supported: ClassVar[bool] = False
    reason: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, content: Any) -> Any:
        kind = content.get("type") if isinstance(content, dict) else None
        raise fault(f"the type {kind!r} is not supported here{cls.reason and ': '}{cls.reason}")


class LeftOut(RequestModel):
    """An item of a list that is left out, such as a tool that only its vendor's servers run. A header reports it.

    known: types of such items; items of any other type are left out as well.
    """

    known: ClassVar[frozenset[str]] = frozenset()

    type: str


def models_of(annotation: Any) -> tuple[type[RequestModel], ...]:
    """Returns the models of the objects that a field may have: itself, in a list, or as a member of a union."""
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        return models_of(annotation.model_fields["root"].annotation)
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        return (annotation,)
    return tuple(model for inner in get_args(annotation) for model in models_of(inner))


class ResponseModel(Struct, forbid_unknown_fields=True):
    """An object of a response: it is sent, and it documents what is sent. UNSET leaves a member out."""


def one_of(*models: type[ResponseModel]) -> Meta:
    """Returns the documentation of a member that is one of these objects."""
    return Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]})


class ErrorResponse(ResponseModel, kw_only=True):
    error: str
    error_type: str
