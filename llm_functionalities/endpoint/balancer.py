"""Chooses the endpoint for each prompt: by the prompt's prefix and by load, away from endpoints that are down.

Prompts that begin alike go to the same endpoint, so that its prefix cache holds what they share: rendezvous hashing
(Thaler and Ravishankar, 1998) of the prefix, which needs no state and agrees between any number of these services.
The load bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): no
endpoint gets much more than its share, however popular a prefix is.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

from llm_functionalities.endpoint.call import Call
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.generation import GenerationParameters
from llm_functionalities.errors import EndpointDown, NoEndpoint

PREFIX_CHARACTERS = 512

# No endpoint gets more than this multiple of the mean load.
LOAD_FACTOR = 1.25


class Balancer:
    """Shares this service's requests among `endpoints`. Without any, every request raises NoEndpoint."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)

    def generate(self, prompt: str, generation: GenerationParameters, call: Call) -> str:
        """Returns the answer of the first endpoint that can be reached. Raises ModelError."""
        problem: EndpointDown | None = None
        for endpoint in self.choices(prompt):
            try:
                return endpoint.generate(prompt, generation, call)
            except EndpointDown as error:
                problem = error  # nothing was sent, so the next one may have it
        raise problem or NoEndpoint("no endpoint is configured: set INFERENCE_ENDPOINT_URL")

    def stream(self, prompt: str, generation: GenerationParameters, call: Call) -> Iterator[str]:
        """Yields the answer of the first endpoint that can be reached, in pieces. Raises ModelError."""
        problem: EndpointDown | None = None
        for endpoint in self.choices(prompt):
            try:
                yield from endpoint.stream(prompt, generation, call)
            except EndpointDown as error:
                problem = error
            else:
                return
        raise problem or NoEndpoint("no endpoint is configured: set INFERENCE_ENDPOINT_URL")

    def choices(self, prompt: str) -> list[Endpoint]:
        """Returns all endpoints, the one to try first at the front.

        Healthy ones within their load bound come first, then busier ones, then those that are down, which refuse at
        once and say why.
        """
        if len(self._endpoints) <= 1:
            return list(self._endpoints)
        prefix = prompt[:PREFIX_CHARACTERS].encode(errors="surrogatepass")
        healthy = [endpoint for endpoint in self._endpoints if endpoint.breaker.closed]
        total = sum(endpoint.in_flight for endpoint in healthy) + 1
        bound = math.ceil(LOAD_FACTOR * total / max(1, len(healthy)))

        def rank(endpoint: Endpoint) -> tuple[bool, bool, bytes]:
            busy = endpoint.in_flight >= bound
            return not endpoint.breaker.closed, busy, _weight(prefix, endpoint.name)

        return sorted(self._endpoints, key=rank)

    def stop(self, timeout: float) -> None:
        """Ends the threads that watch endpoints, within about `timeout` seconds for each."""
        for endpoint in self._endpoints:
            endpoint.breaker.stop(timeout)


def _weight(prefix: bytes, name: str) -> bytes:
    return hashlib.blake2b(prefix, key=hashlib.blake2b(name.encode(), digest_size=16).digest(), digest_size=8).digest()
