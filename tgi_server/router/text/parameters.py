"""The rules that generation parameters keep (TGI's), each with the one line that a client gets for breaking it."""

import random
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TypeVar

from tgi_server.contract import SamplingParameters
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.request import Limits
from tgi_server.router.schemas.generate import GenerateParameters

T = TypeVar("T")

_FLOAT32 = Struct("<f")
_LARGEST_FLOAT32 = 2.0**128 - 2.0**104
_SEED_BITS = 64
_LARGEST_BIAS = 100.0
_LONGEST_STOP = 1_000


def sampling_parameters(
    parameters: GenerateParameters, vocab_size: int, end_tokens: Sequence[int] = ()
) -> SamplingParameters:
    """Returns how to choose tokens. Sampling is on when it is asked for, or anything is set that only shapes sampling.

    vocab_size: tokens that the model can generate. end_tokens: those of them that end a text.

    Raises InvalidRequest.
    """
    _require("temperature", parameters.temperature, lambda value: value > 0, "must be greater than 0")
    _require("repetition_penalty", parameters.repetition_penalty, lambda value: value > 0, "must be greater than 0")
    _require("frequency_penalty", parameters.frequency_penalty, lambda value: abs(value) <= 2, "must be -2 to 2")
    _require("presence_penalty", parameters.presence_penalty, lambda value: abs(value) <= 2, "must be -2 to 2")
    _require("top_p", parameters.top_p, lambda value: 0 < value < 1, "must be greater than 0 and less than 1")
    _require("typical_p", parameters.typical_p, lambda value: 0 < value < 1, "must be greater than 0 and less than 1")
    _require("min_p", parameters.min_p, lambda value: 0 <= value < 1, "must be at least 0 and less than 1")
    _require("top_k", parameters.top_k, lambda value: value > 0, "must be greater than 0")
    stop_tokens = parameters.stop_token_ids or []
    frequency_penalty = _or(parameters.frequency_penalty, 0.0)
    if unknown := [token for token in stop_tokens if token >= vocab_size]:
        raise InvalidRequest(f"`stop_token_ids` has {unknown[0]}; token ids are 0 to {vocab_size - 1}")
    return SamplingParameters(
        do_sample=parameters.do_sample
        or any(
            value is not None
            for value in (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p)
        ),
        temperature=_or(parameters.temperature, 1.0),
        top_k=_or(parameters.top_k, 0),
        top_p=_or(parameters.top_p, 1.0),
        typical_p=_or(parameters.typical_p, 1.0),
        min_p=_or(parameters.min_p, 0.0),
        repetition_penalty=_or(parameters.repetition_penalty, 1.0),
        frequency_penalty=0.0 if parameters.counts_tokens else frequency_penalty,
        presence_penalty=_or(parameters.presence_penalty, 0.0),
        count_penalty=frequency_penalty if parameters.counts_tokens else 0.0,
        seed=_random_seed() if parameters.seed is None else parameters.seed,
        watermark=parameters.watermark,
        logit_bias=_logit_bias(parameters.logit_bias, vocab_size) if parameters.logit_bias else {},
        min_tokens=parameters.min_tokens or 0,
        late_tokens=(*end_tokens, *stop_tokens) if parameters.min_tokens else (),
    )


def check_amounts(parameters: GenerateParameters, limits: Limits) -> None:
    """Checks how much is asked for. Raises InvalidRequest."""
    if parameters.max_new_tokens is not None and parameters.max_new_tokens <= 0:
        raise InvalidRequest(f"`max_new_tokens` must be greater than 0, not {parameters.max_new_tokens}")
    if parameters.min_tokens and parameters.max_new_tokens and parameters.min_tokens > parameters.max_new_tokens:
        raise InvalidRequest(
            f"`min_tokens` must be at most `max_new_tokens` ({parameters.max_new_tokens}), not {parameters.min_tokens}"
        )
    if len(parameters.stop) > limits.max_stop_sequences:
        raise InvalidRequest(
            f"`stop` may have at most {limits.max_stop_sequences} stop sequences, not {len(parameters.stop)}"
        )
    if "" in parameters.stop:
        raise InvalidRequest("`stop` must not have an empty stop sequence")
    longest = max(map(len, parameters.stop), default=0)
    if longest > _LONGEST_STOP:
        raise InvalidRequest(f"a sequence of `stop` has {longest} characters; at most {_LONGEST_STOP} are allowed")
    if (parameters.top_n_tokens or 0) > limits.max_top_n_tokens:
        raise InvalidRequest(f"`top_n_tokens` must be 0 to {limits.max_top_n_tokens}, not {parameters.top_n_tokens}")
    if parameters.truncate is not None and not 0 < parameters.truncate <= limits.max_input_tokens:
        raise InvalidRequest(f"`truncate` must be 1 to {limits.max_input_tokens}, not {parameters.truncate}")


def check_best_of(parameters: GenerateParameters, sampling: SamplingParameters, limits: Limits) -> None:
    """Checks whether several sequences may be generated. Raises InvalidRequest."""
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if best_of == 1:
        return
    if not 0 < best_of <= limits.max_best_of:
        raise InvalidRequest(f"`best_of` must be 1 to {limits.max_best_of}, not {best_of}")
    if not sampling.do_sample:
        raise InvalidRequest("`best_of` needs sampling: set `do_sample`, or a temperature")
    if parameters.seed is not None:
        raise InvalidRequest("`best_of` cannot be used with a `seed`: all sequences would be the same")


def check_streaming(parameters: GenerateParameters) -> None:
    """Refuses parameters that only a response in one piece can have. Raises InvalidRequest."""
    if parameters.best_of not in (None, 1):
        raise InvalidRequest("`best_of` cannot be used when streaming: the best sequence is known at the end only")
    if parameters.decoder_input_details:
        raise InvalidRequest("`decoder_input_details` cannot be used when streaming")


def _random_seed() -> int:
    return random.getrandbits(_SEED_BITS)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            raise InvalidRequest(f"`logit_bias` wants token ids (0 to {vocab_size - 1}) for names, not {token[:20]!r}")
        if abs(bias) > _LARGEST_BIAS:
            raise InvalidRequest(f"`logit_bias` must be -100 to 100, not {bias}")
    return {int(token): bias for token, bias in biases.items()}


def _require(name: str, value: float | None, rule: Callable[[float], bool], fault: str) -> None:
    if value is None:
        return
    if abs(value) > _LARGEST_FLOAT32:
        bound = f"at most {_LARGEST_FLOAT32:.2g}" if value > 0 else f"at least -{_LARGEST_FLOAT32:.2g}"
        raise InvalidRequest(f"`{name}` must be {bound}, not {value}")
    if not rule(_as_float32(value)):
        raise InvalidRequest(f"`{name}` {fault}, not {value}")


def _as_float32(value: float) -> float:
    """Returns the value as the shards get it."""
    (rounded,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    return float(rounded)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
