"""TGI's response headers."""

from collections.abc import Sequence

from tgi_server.router.api.exchange import Exchange
from tgi_server.router.sinks import SequenceSink


def stream_headers(exchange: Exchange, *, characters: int) -> dict[str, str]:
    """What is known before the first token. characters: of the prompts."""
    return {"x-compute-type": exchange.service.model.compute_type, "x-compute-characters": str(characters)}


def timing_headers(exchange: Exchange, *, characters: int, sinks: Sequence[SequenceSink]) -> dict[str, str]:
    """`sinks`: the sequences that the answer shows. Times are in milliseconds, but for `x-compute-time` (seconds)."""
    times = exchange.times()
    return {
        **stream_headers(exchange, characters=characters),
        "x-compute-time": f"{times.total:.6f}",
        "x-total-time": _milliseconds(times.total),
        "x-validation-time": _milliseconds(times.validation),
        "x-queue-time": _milliseconds(times.queue),
        "x-inference-time": _milliseconds(times.inference),
        "x-time-per-token": _milliseconds(times.per_token),
        "x-prompt-tokens": str(sum(sink.input_length for sink in sinks)),
        "x-generated-tokens": str(sum(sink.generated_tokens for sink in sinks)),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
