"""What the API's description says about requests and answers that FastAPI does not handle itself."""

from typing import Any

from pydantic import BaseModel

from tgi_server.router.api.answers import EVENTS, JSON
from tgi_server.router.schemas.base import ErrorResponse
from tgi_server.router.schemas.openai import OpenAIErrorResponse

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    401: "The API key is missing or wrong",
    413: "The request is too large",
    422: "The request breaks a rule",
    424: "The shards failed while generating",
    429: "Too many requests are in flight",
    500: "The generation ended before the last token",
}


def _errors(model: type[BaseModel]) -> Responses:
    return {status: {"description": description, "model": model} for status, description in _ERRORS.items()}


GENERATION_ERRORS = _errors(ErrorResponse)
OPENAI_ERRORS = _errors(OpenAIErrorResponse)
REQUEST_ERRORS: Responses = {status: GENERATION_ERRORS[status] for status in (401, 413, 422, 429)}
STREAM_ERRORS: Responses = {
    status: {**entry, "content": {EVENTS: {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}}
    for status, entry in GENERATION_ERRORS.items()
}


def described_body(model: type[BaseModel]) -> dict[str, Any]:
    """A request body that the endpoint reads itself."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": reference}}}}


def event_stream_of(model: type[BaseModel]) -> Responses:
    """An answer whose events are `model`."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {200: {"description": "Generated text", "content": {EVENTS: {"schema": reference}}}}
