"""Parameters, envelopes, usage and finish reasons of the OpenAI routes."""

from collections.abc import Iterable
from time import time
from uuid import uuid4

from tgi_server.contract import FinishReason
from tgi_server.router.api.responses import quoted
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.generate import GenerateParameters
from tgi_server.router.schemas.grammar import GrammarType
from tgi_server.router.schemas.openai import SharedParameters
from tgi_server.router.service import ModelDescription
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
    request: SharedParameters, *, max_tokens: int | None, grammar: GrammarType | None = None, top_n_tokens: int = 0
) -> GenerateParameters:
    """Returns OpenAI's parameters as TGI's. Sampling is on unless the temperature is 0; a `top_p` of 1 switches it off.

    Raises InvalidRequest.
    """
    if max_tokens == 0:
        raise InvalidRequest("`max_tokens` must be greater than 0, not 0")
    greedy = request.temperature == 0
    return GenerateParameters.model_construct(
        do_sample=not greedy,
        temperature=None if greedy else request.temperature,
        top_p=None if greedy or request.top_p == 1 else request.top_p,
        top_k=None if greedy or request.top_k in (0, -1) else request.top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        max_new_tokens=max_tokens,
        seed=request.seed,
        stop=request.stop or [],
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
        grammar=grammar,
        top_n_tokens=top_n_tokens,
    )


def check_sequences(sequences: int, limit: int, what: str) -> None:
    """Raises InvalidRequest when one request wants more sequences than `max_client_batch_size`."""
    if not 0 < sequences <= limit:
        raise InvalidRequest(f"{what} must be 1 to {limit} (--max-client-batch-size), not {sequences}")


class Envelope:
    """The members that every object of one response has around its choices."""

    def __init__(self, kind: str, identity: str, model: ModelDescription) -> None:
        """kind: the `object`. identity: the beginning of the `id`."""
        self._head = (
            f'{{"object":"{kind}","id":"{identity}-{uuid4().hex}","created":{int(time())},'
            f'"model":{quoted(model.model_id)},"system_fingerprint":{quoted(model.fingerprint)},"choices":['
        )

    def wrap(self, choices: str, usage: str | None = None) -> str:
        """Returns a response or a chunk. choices: JSON, comma-separated. usage: JSON of it; None leaves it out."""
        return f"{self._head}{choices}]}}" if usage is None else f'{self._head}{choices}],"usage":{usage}}}'


def usage_json(prompt_tokens: int, streams: Iterable[AnyStream]) -> str:
    completion_tokens = sum(stream.generated_tokens for stream in streams)
    return (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens}}}'
    )
