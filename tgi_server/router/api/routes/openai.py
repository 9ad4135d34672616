"""Parameters, envelopes, usage and finish reasons of the OpenAI routes."""

import re
from collections.abc import Iterable, Sequence
from time import time
from typing import Any
from uuid import uuid4

from tgi_server.contract import FinishReason
from tgi_server.router.api.responses import quoted
from tgi_server.router.errors import InvalidRequest, NoSuchModel
from tgi_server.router.schemas.generate import CountingParameters, GenerateParameters
from tgi_server.router.schemas.grammar import GrammarType, JsonGrammar, LarkGrammar, PlainText, RegexGrammar
from tgi_server.router.schemas.openai import SharedParameters, StructuredOutputs
from tgi_server.router.service import ModelDescription, Service
from tgi_server.router.text.generation_config import SAMPLING_DEFAULTS
from tgi_server.router.text.token_stream import AnyStream

DONE = b"data: [DONE]\n\n"

_FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}


def finish_reason(reason: FinishReason) -> str:
    """Returns OpenAI's name of it."""
    return _FINISH_REASONS[reason]


def generation_parameters(
    request: SharedParameters, service: Service, *, max_tokens: int | None, top_n_tokens: int = 0
) -> GenerateParameters:
    """Returns OpenAI's parameters as TGI's, with the model's own defaults for those that are not given.

    Sampling is on unless the temperature or `top_p` is 0; a `top_p` of 1 switches that off. Raises InvalidRequest.
    """
    if max_tokens == 0:
        raise InvalidRequest("`max_tokens` must be greater than 0, not 0")
    given = {name: value for name in SAMPLING_DEFAULTS if (value := getattr(request, name)) is not None}
    chosen = {**service.sampling_defaults, **given}
    temperature, top_p, top_k = chosen.get("temperature"), chosen.get("top_p"), chosen.get("top_k")
    greedy = temperature == 0 or top_p == 0
    truncate = request.truncate_prompt_tokens
    return CountingParameters.model_construct(
        do_sample=not greedy,
        temperature=None if greedy else temperature,
        top_p=None if greedy or top_p == 1 else top_p,
        top_k=None if greedy or top_k in (0, -1) else top_k,
        min_p=chosen.get("min_p"),
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=chosen.get("repetition_penalty"),
        logit_bias=request.logit_bias,
        max_new_tokens=max_tokens,
        min_tokens=request.min_tokens,
        # Those below 0 are taken as the same bits without a sign.
        seed=None if request.seed in (None, -1) else request.seed % 2**64,
        stop=request.stop or [],
        stop_token_ids=request.stop_token_ids,
        skip_special_tokens=request.skip_special_tokens,
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
        adapter_id=named_adapter(service, request.model),
        truncate=service.limits.max_input_tokens if truncate == -1 else truncate,
        grammar=requested_form(request),
        top_n_tokens=top_n_tokens,
    )


def named_adapter(service: Service, model: str | None) -> str | None:
    """Returns the adapter that the field `model` names; None for the model itself.

    A server that has no adapters takes any name, because clients often have one of another server. Raises NoSuchModel.
    """
    if not model or service.model.is_named(model):
        return None
    if any(adapter.id == model for adapter in service.adapters):
        return model
    if not len(service.adapters) and service.adapter_root is None:
        return None
    known = ", ".join(map(repr, (*service.model.names, *(adapter.id for adapter in service.adapters))))
    raise NoSuchModel(f"there is no model {model[:100]!r} here; there are {known}")


def requested_form(request: SharedParameters) -> GrammarType | None:
    """Returns the form that the answer must have, whichever of the fields asks for it; None for any text.

    Raises InvalidRequest when several do.
    """
    outputs = request.structured_outputs or StructuredOutputs()
    asked = [
        form
        for form in (
            request.response_format,
            *map(_json, (request.guided_json, request.json_schema)),
            _json(outputs.json_schema),
            _json({"type": "object"} if outputs.json_object else None),
            *map(_regex, (request.guided_regex, request.regex, outputs.regex)),
            *map(_choice, (request.guided_choice, outputs.choice)),
            *map(_lark, (request.guided_grammar, outputs.grammar)),
        )
        if form is not None and not isinstance(form.root, PlainText)
    ]
    if len(asked) > 1:
        raise InvalidRequest(
            "more than one of `response_format`, `structured_outputs`, `guided_*`, `json_schema` and `regex` says what "
            "form the answer has"
        )
    return asked[0] if asked else None


def _json(schema: Any) -> GrammarType | None:
    return None if schema is None else GrammarType(JsonGrammar(type="json", value=schema))


def _regex(regex: str | None) -> GrammarType | None:
    return None if regex is None else GrammarType(RegexGrammar(type="regex", value=regex))


def _lark(grammar: str | None) -> GrammarType | None:
    return None if grammar is None else GrammarType(LarkGrammar(type="lark", value=grammar))


def _choice(texts: Sequence[str] | None) -> GrammarType | None:
    if texts is None:
        return None
    if not texts:
        raise InvalidRequest("a choice needs at least one text to choose")
    return _regex("|".join(map(re.escape, texts)))


def check_sequences(sequences: int, limit: int, what: str) -> None:
    """Raises InvalidRequest when one request wants more sequences than OpenAI's interface, or the server, has."""
    if not 0 < sequences <= limit:
        raise InvalidRequest(f"{what} must be 1 to {limit}, not {sequences}")


class Envelope:
    """The members that every object of one response has around its choices."""

    def __init__(self, kind: str, identity: str, model: ModelDescription, adapter_id: str | None) -> None:
        """kind: the `object`. identity: the beginning of the `id`. adapter_id: the adapter that the request names."""
        self._head = (
            f'{{"object":"{kind}","id":"{identity}-{uuid4().hex}","created":{int(time())},'
            f'"model":{quoted(adapter_id or model.names[0])},"system_fingerprint":{quoted(model.fingerprint)},'
            '"choices":['
        )

    def wrap(self, choices: str, usage: str | None = None) -> str:
        """Returns a response or a chunk. choices: JSON, comma-separated. usage: JSON of it; None leaves it out."""
        return f"{self._head}{choices}]}}" if usage is None else f'{self._head}{choices}],"usage":{usage}}}'


def usage_json(prompt_tokens: int, streams: Iterable[AnyStream], cached_tokens: int) -> str:
    """cached_tokens: of the prompts, those that had been computed for others."""
    completion_tokens = sum(stream.generated_tokens for stream in streams)
    return (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}}}'
    )
