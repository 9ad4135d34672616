"""Base classes and types of all bodies."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

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
    """A request's JSON. Types are taken at their word (no "20" for 20); unknown fields are let through, as in TGI."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


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


class ResponseModel(BaseModel):
    """An answer's JSON, for the API's description; answers themselves are written as bytes."""

    model_config = ConfigDict(extra="forbid")


class ErrorResponse(ResponseModel):
    error: str
    error_type: str
