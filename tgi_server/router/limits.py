"""The limits that a server sets to requests, in TGI's interface and in the others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

# Limits of OpenAI's interface. It takes 4 stop sequences; evaluation suites send more.
OPENAI = {"max_best_of": 128, "max_client_batch_size": 128, "max_stop_sequences": 16, "max_top_n_tokens": 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the server, known once the shards have warmed up. All in tokens or requests.

    given: names of the limits that the operator chose. They hold in all interfaces; the defaults of some are TGI's.
    """

    max_concurrent_requests: int
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    given: frozenset[str] = frozenset()
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_waiting_tokens: int
    waiting_served_ratio: float
    max_batch_size: int

    @classmethod
    def chosen(cls, values: Mapping[str, int | None], **others: Any) -> Self:
        """Returns the limits. values: limits whose default depends on the interface; None: use the default."""
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**given, given=frozenset(given), **others)

    def of_openai(self) -> Self:
        """Returns the limits of the interfaces that are not TGI's: OpenAI's, where the operator chose none."""
        usual: dict[str, Any] = {name: value for name, value in OPENAI.items() if name not in self.given}
        limits = replace(self, **usual)
        return replace(limits, max_client_batch_size=min(limits.max_client_batch_size, self.max_concurrent_requests))
