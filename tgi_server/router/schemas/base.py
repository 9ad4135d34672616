"""Base classes and types of all bodies."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

# Bounds of parameters, for the API's description: `text/parameters.py` enforces them, with a message of its own.
POSITIVE: dict[str, JsonValue] = {"exclusiveMinimum": 0}
PROBABILITY: dict[str, JsonValue] = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
PENALTY: dict[str, JsonValue] = {"minimum": -2, "maximum": 2}
NOT_EMPTY: dict[str, JsonValue] = {"minLength": 1}
SEVERAL: dict[str, JsonValue] = {"minItems": 1}

T = TypeVar("T")

# Numbers that fit into the messages to the shards (proto/generate.proto).
UnsignedInt = Annotated[int, Field(ge=0, le=2**32 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
CacheSalt = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=1024,
        description="What is computed for the prompt is used again for prompts with the same salt only.",
    ),
]

# A list of a bounded length. Its first wrong item is the one that is told: there may be as many as a body can hold.
Items = Annotated[list[T], Field(max_length=10_000, fail_fast=True)]

# Added to the logits, by token id.
TokenBiases = Annotated[dict[str, float], Field(max_length=1024, fail_fast=True)]

TokenIds = Annotated[list[UnsignedInt], Field(max_length=1024, fail_fast=True)]

Name = Annotated[str, Field(max_length=256)]

# Switches of OpenAI's routes, for which clients send null as well, which means that they are not set.
Off = Annotated[
    bool, BeforeValidator(lambda value: False if value is None else value, json_schema_input_type=bool | None)
]
On = Annotated[
    bool, BeforeValidator(lambda value: True if value is None else value, json_schema_input_type=bool | None)
]


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


class ResponseModel(BaseModel):
    """An answer's JSON, for the API's description; answers themselves are written as bytes."""

    model_config = ConfigDict(extra="forbid")


class ErrorResponse(ResponseModel):
    error: str
    error_type: str
