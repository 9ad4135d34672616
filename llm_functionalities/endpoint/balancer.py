"""Chooses the endpoint for each prompt by the prompt's prefix, by load and by health.

A prompt goes to the endpoint that was sent the longest prefix of it before, such as the last turn of its conversation,
unless that one is much busier than others. New prompts with the same prefix go to the same endpoint, so that its prefix
cache has it: rendezvous hashing (Thaler and Ravishankar, 1998) of the prefix needs no state, and has the same result in
any number of these services. The load bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2016): no endpoint gets much more than its share, however popular a prefix is.
"""

import hashlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TypeAlias

from llm_functionalities.endpoint.call import Call
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.generation import GeneratedText, GenerationParameters
from llm_functionalities.endpoint.hedging import Attempt, Hedging
from llm_functionalities.errors import CircuitOpen, EndpointDown, EndpointRefused, ModelError, NoEndpoint
from shared.prefix_affinity import PrefixAffinity

PREFIX_CHARACTERS = 512

# No endpoint gets more than this multiple of the mean load.
LOAD_FACTOR = 1.25

# The endpoint with the longest prefix of a prompt may have this many more requests than the least busy one, as it has
# less to compute.
KNOWN_PREFIX_BOUND = 4

# One request in this many ignores that an endpoint stalls intermittently, to find out if it still does.
TRIAL_EVERY = 50

# Kinds of requests besides the routes that JSON is posted to.
GENERATE, STREAM = "generate", "stream"

Pieces: TypeAlias = Generator[GeneratedText, None, None]
# Sends a request to an endpoint, and yields the pieces of the response.
Ask: TypeAlias = Callable[[Endpoint, Call], Pieces]

# After one of these errors nothing was generated, so the request may be sent to another endpoint.
_NOT_BEGUN = (EndpointDown, EndpointRefused)


class Sender(ABC):
    """Sends requests to an endpoint of its choice, and to others if that one generated nothing."""

    def generate(self, prompt: str, generation: GenerationParameters, call: Call) -> GeneratedText:
        """Returns the answer of the first endpoint that accepts the request. Raises ModelError."""

        def ask(endpoint: Endpoint, call: Call) -> Pieces:
            yield endpoint.generate(prompt, generation, call)

        with closing(self.pieces(GENERATE, prompt, ask, call, generation.max_tokens)) as pieces:
            return next(pieces)

    def post(self, route: str, body: str, call: Call) -> GeneratedText:
        """Returns the response of the first endpoint that accepts a body of JSON. Raises ModelError."""

        def ask(endpoint: Endpoint, call: Call) -> Pieces:
            yield endpoint.post(route, body, call)

        with closing(self.pieces(route, body, ask, call)) as pieces:
            return next(pieces)

    def stream(self, prompt: str, generation: GenerationParameters, call: Call) -> Pieces:
        """Yields the pieces of the answer of the first endpoint that accepts the request. Raises ModelError."""

        def ask(endpoint: Endpoint, call: Call) -> Pieces:
            return endpoint.stream(prompt, generation, call)

        return self.pieces(STREAM, prompt, ask, call, generation.max_tokens)

    @abstractmethod
    def pieces(self, kind: str, prompt: str, ask: Ask, call: Call, max_tokens: int = 0) -> Pieces:
        """Yields the pieces of the chosen endpoint's response. Raises ModelError.

        kind: GENERATE, STREAM or a route. prompt: the text by which endpoints are chosen. max_tokens: maximum tokens of
        the answer; 0 for a response that is not generated.
        """

    @abstractmethod
    def destinations(self, prompt: str) -> list[Endpoint]:
        """Returns the endpoints that will get prompts that begin with `prompt`, for computing it in advance."""


class Balancer(Sender):
    """Distributes this service's requests among `endpoints`. Without any, every request raises NoEndpoint.

    When the last available endpoint fails, another one may have recovered since its last health check. So for
    `uncertain_seconds` calls also try the unavailable endpoints.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        uncertain_seconds: float = 3.0,
        *,
        hedging: Hedging | None = None,
        fallback: Endpoint | None = None,
        count_fallback: Callable[[], None] = lambda: None,
    ) -> None:
        """fallback: gets requests that no other endpoint accepts. count_fallback: called for each of them."""
        self._endpoints = tuple(endpoints)
        self._hedging = hedging
        self._fallback = fallback
        self._count_fallback = count_fallback
        self._uncertain_seconds = uncertain_seconds
        self._well_at = -math.inf
        self._choices = itertools.count(1)
        self._affinity = PrefixAffinity()

    @property
    def ready(self) -> bool:
        """True if the circuit of at least one endpoint is closed."""
        return any(endpoint.breaker.closed for endpoint in self._all)

    @property
    def _all(self) -> tuple[Endpoint, ...]:
        return self._endpoints if self._fallback is None else (*self._endpoints, self._fallback)

    @property
    def healthy(self) -> bool:
        """True if the circuit of at least one endpoint is closed, and that endpoint is not avoided after a failure."""
        return any(endpoint.breaker.closed and not endpoint.is_avoided for endpoint in self._all)

    def pieces(self, kind: str, prompt: str, ask: Ask, call: Call, max_tokens: int = 0) -> Pieces:
        if self._hedging is None:
            yield from self._tries(prompt, ask, call)
            return

        def second(first: Call) -> Attempt[GeneratedText] | None:
            endpoint = self._second_choice(prompt, first)
            return None if endpoint is None else partial(ask, endpoint)

        yield from self._hedging.race(kind, call, partial(self._tries, prompt, ask), second)

    def _tries(self, prompt: str, ask: Ask, call: Call) -> Pieces:
        """Yields the pieces of the first endpoint that accepts the request, or else of the fallback."""
        problems: dict[Endpoint, ModelError] = {}
        for endpoint in self._attempts(prompt, problems, call):
            begun = False
            call.tried.add(endpoint.name)
            self._sent(prompt, endpoint)
            try:
                with closing(ask(endpoint, call)) as pieces:
                    for piece in pieces:
                        begun = True
                        yield piece
            except _NOT_BEGUN as error:
                if begun:
                    raise
                problems[endpoint] = error
                call.allow_another()
            else:
                return
        raise _worst(list(problems.values()))

    def _second_choice(self, prompt: str, first: Call) -> Endpoint | None:
        """Returns the healthy endpoint that is next for the prompt after those tried; None if there is none."""
        others = [each for each in self.choices(prompt) if each.name not in first.tried]
        if self._fallback is not None and self._fallback.name not in first.tried:
            others.append(self._fallback)
        return next((each for each in others if each.breaker.closed and not each.is_avoided), None)

    def choices(self, prompt: str) -> list[Endpoint]:
        """Returns all endpoints in the order in which to try them.

        Healthy ones within their load bound come first, led by the one that was sent the longest prefix of the prompt;
        then busier ones, then ones that stall intermittently, then ones that failed recently, then ones that are down,
        which refuse at once with the reason.
        """
        if len(self._endpoints) <= 1:
            return list(self._endpoints)
        if any(endpoint.breaker.closed for endpoint in self._endpoints):
            self._well_at = time.monotonic()
        prefix = prompt[:PREFIX_CHARACTERS].encode(errors="surrogatepass")
        known = self._affinity.known(prompt.encode(errors="surrogatepass"))
        avoided = {endpoint for endpoint in self._endpoints if endpoint.is_avoided}
        healthy = [endpoint for endpoint in self._endpoints if endpoint.breaker.closed and endpoint not in avoided]
        stalling = self._stalling(healthy)
        preferred = [endpoint for endpoint in healthy if endpoint not in stalling]
        total = sum(endpoint.in_flight for endpoint in preferred) + 1
        bound = math.ceil(LOAD_FACTOR * total / max(1, len(preferred)))
        least = min((endpoint.in_flight for endpoint in preferred), default=0)

        def rank(endpoint: Endpoint) -> tuple[bool, bool, bool, bool, int, int, bytes]:
            length, load = known.get(endpoint.name, 0), endpoint.in_flight
            busy = load > least + KNOWN_PREFIX_BOUND if length else load >= bound
            gone, late = not endpoint.breaker.closed, endpoint in stalling
            return gone, endpoint in avoided, late, busy, -length, load if length else 0, _weight(prefix, endpoint.name)

        return sorted(self._endpoints, key=rank)

    def _stalling(self, healthy: Sequence[Endpoint]) -> set[Endpoint]:
        """Returns the endpoints that stall intermittently, unless most do, or this request is to try them."""
        if self._hedging is None:
            return set()
        stalling = {endpoint for endpoint in healthy if self._hedging.stalls(endpoint.name)}
        is_trial = bool(stalling) and next(self._choices) % TRIAL_EVERY == 0
        return set() if is_trial or 2 * len(stalling) > len(healthy) else stalling

    def _sent(self, prompt: str, endpoint: Endpoint) -> None:
        """Records that an endpoint gets a prompt, or a prefix of it."""
        if len(self._endpoints) > 1 and endpoint is not self._fallback:
            self._affinity.sent(prompt.encode(errors="surrogatepass"), endpoint.name)

    def destinations(self, prompt: str) -> list[Endpoint]:
        """Returns the endpoints that will get prompts that begin with `prompt`, and records that they have it.

        That is one endpoint if `prompt` has PREFIX_CHARACTERS characters, so that the hash of the prefix is known;
        otherwise all available endpoints.
        """
        choices = self.choices(prompt) or list(self._all)
        available = [choice for choice in choices if choice.breaker.closed and not choice.is_avoided]
        chosen = (available or choices)[: 1 if len(prompt) >= PREFIX_CHARACTERS else None]
        for endpoint in chosen:
            self._sent(prompt, endpoint)
        return chosen

    def _attempts(self, prompt: str, problems: Mapping[Endpoint, ModelError], call: Call) -> Iterator[Endpoint]:
        """Yields the endpoints in the order to try them. problems: the errors of the endpoints that were tried.

        If an endpoint was available a moment ago, those with an open circuit are tried last.
        """
        choices = self.choices(prompt)
        yield from choices
        if self._fallback is not None:
            self._count_fallback()
            yield self._fallback
        if len(choices) > 1 and time.monotonic() - self._well_at < self._uncertain_seconds:
            call.insists = True
            yield from [endpoint for endpoint in choices if isinstance(problems[endpoint], CircuitOpen)]

    def stop(self, timeout: float) -> None:
        """Ends the threads that watch endpoints, within about `timeout` seconds for each."""
        if self._hedging is not None:
            self._hedging.stop()
        for endpoint in self._all:
            endpoint.breaker.stop(timeout)


def _worst(problems: Sequence[ModelError]) -> ModelError:
    """Returns the error to report when no endpoint accepted a request: a refusal, if there was one, or the last."""
    if not problems:
        return NoEndpoint("no endpoint is configured: set INFERENCE_ENDPOINT_URL")
    return next((problem for problem in reversed(problems) if isinstance(problem, EndpointRefused)), problems[-1])


def _weight(prefix: bytes, name: str) -> bytes:
    return hashlib.blake2b(prefix, key=hashlib.blake2b(name.encode(), digest_size=16).digest(), digest_size=8).digest()
