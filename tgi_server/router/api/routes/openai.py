"""Parameters, envelopes, usage and finish reasons of the OpenAI routes."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import time
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from tgi_server.contract import FinishReason, GenerationOptions, Grammar, GrammarKind
from tgi_server.router.api.admission import Admission
from tgi_server.router.errors import InvalidRequest, NoSuchModel
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.openai import (
    PrefixDifference,
    PrefixExplanation,
    PromptTokensDetails,
    SharedParameters,
    StructuredOutputs,
    Usage,
)
from tgi_server.router.schemas.responses import ResponsesRequest
from tgi_server.router.service import ModelDescription, Service
from tgi_server.router.text.grammar import ANY_OBJECT, json_grammar, requested_grammar
from tgi_server.router.text.prefix_miss import PrefixMiss
from tgi_server.router.text.token_stream import AnyStream

DONE = b"data: [DONE]\n\n"
_PIECE = 32_768  # characters
_MEMBERS = "stream_options.include_members"

_FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}


def finish_reason(reason: FinishReason) -> str:
    """Returns OpenAI's name of a finish reason."""
    return _FINISH_REASONS[reason]


def openai_options(
    admission: Admission, request: SharedParameters | ResponsesRequest, dialect: Dialect
) -> GenerationOptions:
    """Returns the options of a request of OpenAI's API. Raises InvalidRequest, or NoSuchModel."""
    options = admission.options(request, dialect, streams=request.stream)
    return replace(options, adapter_id=named_adapter(admission.service, request.model))


def named_adapter(service: Service, model: str | None) -> str | None:
    """Returns the adapter that the field `model` names; None for the model itself.

    A server without adapters accepts any name, because clients often send the name of another server's model. Raises
    NoSuchModel.
    """
    if not model or service.model.is_named(model):
        return None
    if any(adapter.id == model for adapter in service.adapters):
        return model
    if encoder := service.encoders.named(model):
        raise NoSuchModel(f"{model[:100]!r} generates no text: it is a model to {encoder.info.task}")
    if not len(service.adapters) and service.policy.adapter_root is None:
        return None
    known = ", ".join(map(repr, (*service.model.names, *(adapter.id for adapter in service.adapters))))
    raise NoSuchModel(f"there is no model {model[:100]!r} here; there are {known}")


def requested_form(request: SharedParameters) -> Grammar | None:
    """Returns the grammar of the answer, from any of the fields that can set one; None for any text.

    Raises InvalidRequest if several fields set different ones, or if members are requested without a JSON schema.
    """
    outputs = request.structured_outputs or StructuredOutputs()
    schemas = {
        "guided_json": request.guided_json,
        "json_schema": request.json_schema,
        "structured_outputs.json": outputs.json_schema,
        "structured_outputs.json_object": ANY_OBJECT if outputs.json_object else None,
    }
    choices = {"guided_choice": request.guided_choice, "structured_outputs.choice": outputs.choice}
    regexes = {"guided_regex": request.guided_regex, "regex": request.regex, "structured_outputs.regex": outputs.regex}
    larks = {"guided_grammar": request.guided_grammar, "structured_outputs.grammar": outputs.grammar}
    found = [
        requested_grammar(request.response_format),
        *(json_grammar(schema, place=place) for place, schema in schemas.items() if schema is not None),
        *(Grammar(GrammarKind.REGEX, text, place=place) for place, text in regexes.items() if text is not None),
        *(_choice(texts, place) for place, texts in choices.items() if texts is not None),
        *(Grammar(GrammarKind.LARK, text, place=place) for place, text in larks.items() if text is not None),
    ]
    # Clients may set the same grammar in several fields; among equal ones, the strictest counts.
    asked = sorted(filter(None, found), key=lambda form: len(form.lenient))
    forms = list({(form.type, form.value): form for form in reversed(asked)}.values())
    if len(forms) > 1:
        raise InvalidRequest(
            "more than one of `response_format`, `structured_outputs`, `guided_*`, `json_schema` and `regex` says what "
            "form the answer has",
            param="response_format",
        )
    form = forms[0] if forms else None
    if wants_members(request) and not request.stream:
        raise InvalidRequest.at(_MEMBERS, "needs `stream`")
    if wants_members(request) and (form is None or form.type is not GrammarKind.JSON_SCHEMA):
        raise InvalidRequest.at(_MEMBERS, "needs an answer in JSON: give `response_format` a JSON schema")
    return form


def wants_members(request: SharedParameters) -> bool:
    """Returns True if members of a JSON answer are to be sent as soon as each is complete."""
    return request.stream_options is not None and request.stream_options.include_members


def _choice(texts: Sequence[str], place: str) -> Grammar:
    if not texts:
        raise InvalidRequest.at(place, "is empty; it needs at least one text to choose")
    return Grammar(GrammarKind.REGEX, "|".join(map(_escaped, texts)), place=place)


def _escaped(text: str) -> str:
    """Returns a regular expression for the text. Works in pieces, so that other threads can run in between."""
    return "".join(re.escape(text[start : start + _PIECE]) for start in range(0, len(text), _PIECE))


def envelope(identity: str, model: ModelDescription, adapter_id: str | None) -> dict[str, Any]:
    """Returns the members that all objects of a response have in common.

    identity: the beginning of the `id`. adapter_id: the adapter that the request names.
    """
    return {
        "id": f"{identity}-{uuid4().hex}",
        "created": int(time()),
        "model": adapter_id or model.names[0],
        "system_fingerprint": model.fingerprint,
    }


def explanation_of(miss: PrefixMiss) -> PrefixExplanation:
    """Converts the explanation of a prefix-cache miss for the response."""
    found = miss.difference
    shown = None
    if found is not None:
        texts = {"before": found.before, "here": found.here, "earlier": found.earlier}
        shown = PrefixDifference(place=found.place, offset=found.offset, **texts)
    return PrefixExplanation(
        cause=None if miss.cause is None else miss.cause.value,
        missing_tokens=miss.missing_tokens,
        known_tokens=miss.known_tokens,
        movable_tokens=miss.movable_tokens,
        difference=shown,
    )


def usage_of(
    prompt_tokens: int, streams: Iterable[AnyStream], cached_tokens: int, miss: PrefixMiss | None = None
) -> Usage:
    """Returns the usage. cached_tokens: number of prompt tokens from the prefix cache. miss: adds its explanation."""
    completion_tokens = sum(stream.generated_tokens for stream in streams)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=cached_tokens, prefix=UNSET if miss is None else explanation_of(miss)
        ),
    )
