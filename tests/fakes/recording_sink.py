"""A sink that remembers what it was told, and requests that use it."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from shared.stubs.generate_pb2 import Generation
from tgi_server.contract import FinishReason, GenerationOptions, ReportParameters, StoppingParameters
from tgi_server.router.errors import RouterError
from tgi_server.router.submission import KeptPrefix, PreparedRequest


class RecordingSink:
    """Takes tokens until there are `stop_after` of them; then it asks for the end, as for a stop sequence.

    on_end: called when nothing more comes. Whatever it is told after the end is an error.
    """

    def __init__(self, stop_after: int | None = None, on_end: Callable[[], None] = lambda: None) -> None:
        self.tokens: list[int] = []
        self.prefill_ids: list[int] = []
        self.starts = 0
        self.reason: FinishReason | None = None
        self.error: RouterError | None = None
        self._stop_after = stop_after
        self._on_end = on_end

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None

    def started(self, cached_tokens: int) -> None:
        assert not self.ended
        self.starts += 1

    def push(self, generation: Generation) -> FinishReason | None:
        assert not self.ended
        assert self.starts == 1
        self.tokens += generation.token_ids
        self.prefill_ids += generation.prefill_tokens.ids
        stop = self._stop_after is not None and len(self.tokens) >= self._stop_after
        if stop:
            del self.tokens[self._stop_after :]
        return FinishReason.STOP_SEQUENCE if stop else None

    def finished(self, reason: FinishReason) -> None:
        assert not self.ended
        self.reason = reason
        self._on_end()

    def failed(self, error: RouterError) -> None:
        assert not self.ended
        self.error = error
        self._on_end()


def recorded_request(
    request_id: int,
    input_ids: Sequence[int],
    max_new_tokens: int = 8,
    *,
    stop_after: int | None = None,
    on_end: Callable[[], None] = lambda: None,
    ignore_eos: bool = True,
    top_n_tokens: int = 0,
    prefill_logprobs: bool = False,
    cache_namespace: str = "",
    trace_context: dict[str, str] | None = None,
    deadline: float = inf,
    first_token_by: float = inf,
    tenant: str = "",
    weight: float = 1.0,
    keep: KeptPrefix | None = None,
    **options: Any,
) -> tuple[PreparedRequest, RecordingSink]:
    """Returns a request, and a sink for it. It ignores the end-of-sequence token by default."""
    sink = RecordingSink(stop_after, on_end)
    stopping = StoppingParameters(max_new_tokens, ignore_eos)
    report = ReportParameters(top_n_tokens=top_n_tokens, prefill_logprobs=prefill_logprobs)
    chosen = GenerationOptions(stopping=stopping, report=report, **options)
    request = PreparedRequest(
        list(input_ids),
        chosen,
        id=request_id,
        cache_namespace=cache_namespace,
        trace_context=trace_context or {},
        deadline=deadline,
        first_token_by=first_token_by,
        tenant=tenant,
        weight=weight,
        keep=keep,
    )
    return request, sink
