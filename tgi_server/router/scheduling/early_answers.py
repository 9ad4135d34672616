"""Early answers: beginnings of answers that are generated in the background, before a request for them arrives.

The message that the shards get determines the tokens of a request. So a request with the same message as an earlier one
has the same tokens and log-probabilities. It gets the known tokens at once, and continues from there like a sequence
that was preempted after them.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from time import perf_counter
from typing import Any

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.errors import RouterError, Superseded
from tgi_server.router.metrics import EarlyAnswerMetrics
from tgi_server.router.scheduling.sequence import Outcome, Sequence, tell_end
from tgi_server.router.submission import Sink
from tgi_server.wire import grammar_to_message

logger = logging.getLogger(__name__)

# Maximum number of answers that are kept.
_MOST_ANSWERS = 64


@dataclass(slots=True, eq=False)
class _Answer:
    """The beginning of an answer.

    name: the cache namespace and the name of the prompt; an answer to another prompt with this name replaces it.
    known: the tokens so far, in the form of one step's tokens. logprobs: True if they have log-probabilities. writer:
    the request that generates the answer; None: it has ended. expires: the time of the clock, in seconds.
    """

    name: tuple[str, str]
    known: pb.Generation
    logprobs: bool
    writer: Sequence | None
    expires: float = inf


class EarlyAnswers:
    """Keeps beginnings of answers, by a digest of what determines them, until they expire or are replaced."""

    def __init__(
        self,
        enter: Callable[[Sequence], None],
        start: Callable[[Sequence], bool],
        end: Callable[[Sequence, Outcome], Any],
        cancel: Callable[[int], str],
        metrics: EarlyAnswerMetrics,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """enter: queues a request. start: notifies a request's sink that it has begun; returns False if that ended the
        request. end: ends a request. cancel: ends the request with an id without notifying its sink; returns an empty
        text if the id is unknown. clock: returns seconds.
        """
        self._enter = enter
        self._start = start
        self._end = end
        self._cancel = cancel
        self._metrics = metrics
        self._clock = clock
        self._answers: dict[bytes, _Answer] = {}  # the latest is the last
        self._beginning: dict[int, Sequence] = {}  # requests that are about to get known tokens, by id

    def begin(self, sequence: Sequence) -> None:
        """Gives a new request the known tokens of its answer, and queues it.

        The tokens of a request for an early answer are recorded. A request that continues or replaces an answer ends
        the request that generates it.
        """
        request = sequence.request
        if not (self._answers or request.early_tokens):
            self._enter(sequence)
            return
        self._drop_expired()
        key = _digest(sequence)
        self._drop_replaced(sequence, key)
        known, answer = pb.Generation(), self._answers.get(key)
        if answer is not None:
            self._stop_writing(answer)
            if answer.logprobs or not request.options.report.logprobs:
                known.CopyFrom(answer.known)
        if request.early_tokens:
            self._record(sequence, key, known)
        if known.token_ids:
            self._beginning[sequence.id] = sequence
            asyncio.get_running_loop().call_soon(self._hand_out, sequence, known)
        else:
            self._enter(sequence)

    def get(self, request_id: int) -> Sequence | None:
        """Returns the request with this id if it is about to get known tokens."""
        return self._beginning.get(request_id)

    def leave(self, sequence: Sequence) -> None:
        """Removes a request that has ended."""
        self._beginning.pop(sequence.id, None)

    def forget(self, namespace: str) -> None:
        """Deletes the answers of a cache namespace."""
        for key in [key for key, answer in self._answers.items() if answer.name[0] == namespace]:
            self._forget(key)

    def _hand_out(self, sequence: Sequence, known: pb.Generation) -> None:
        """Gives the request the known beginning of its answer, and queues it unless that ends it."""
        if self._beginning.pop(sequence.id, None) is None:
            return
        try:
            self._advance(sequence, known)
        except Exception:
            logger.exception("the answer to request %d that is known could not be handled", sequence.id)
            self._end(sequence, RouterError("the beginning of the answer could not be handled"))

    def _advance(self, sequence: Sequence, known: pb.Generation) -> None:
        sequence.find_prompt()
        if not self._start(sequence):
            return
        if not sequence.request.options.report.logprobs:
            known.ClearField("logprobs")
        if not sequence.request.early_tokens:
            self._metrics.used(len(known.token_ids))
        if (outcome := sequence.advance(known)) is not None:
            self._end(sequence, outcome)
        else:
            sequence.preempt()
            self._enter(sequence)

    def _record(self, sequence: Sequence, key: bytes, known: pb.Generation) -> None:
        """Records the tokens of a request as an early answer. known: the tokens that it begins with."""
        self._answers.pop(key, None)
        if len(self._answers) >= _MOST_ANSWERS:
            self._forget(next(iter(self._answers)))
        answer = _Answer(_name(sequence), pb.Generation(), sequence.request.options.report.logprobs, sequence)
        answer.known.CopyFrom(known)
        self._answers[key] = answer
        sequence.send_to(_EarlySink(sequence, answer, self._metrics, self._clock))

    def _stop_writing(self, answer: _Answer) -> None:
        """Ends the request that generates the answer: its tokens are needed now, or not at all."""
        writer, answer.writer = answer.writer, None
        if writer is not None and self._cancel(writer.id):
            tell_end(writer.id, writer.sink, Superseded("another request continues or replaces the answer"))

    def _drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, answer in self._answers.items() if answer.expires <= now]:
            self._forget(key)

    def _drop_replaced(self, sequence: Sequence, key: bytes) -> None:
        """Forgets the answers to earlier prompts of the same name: the words have changed."""
        if sequence.request.keep is not None:
            name = _name(sequence)
            for other in [each for each, answer in self._answers.items() if answer.name == name and each != key]:
                self._forget(other)

    def _forget(self, key: bytes) -> None:
        self._stop_writing(self._answers.pop(key))


class _EarlySink:
    """Passes tokens to the sink of a request, records them as an early answer, and ends the request when it has enough.

    Recording stops at the first hidden tokens (hints), because a step does not report these.
    """

    def __init__(
        self, sequence: Sequence, answer: _Answer, metrics: EarlyAnswerMetrics, clock: Callable[[], float]
    ) -> None:
        self._sink: Sink = sequence.sink
        self._answer = answer
        self._metrics = metrics
        self._clock = clock
        self._seconds = sequence.request.keep.seconds if sequence.request.keep is not None else 0.0
        self._missing = sequence.request.early_tokens
        self._repeated = bool(answer.known.token_ids)  # the first tokens are known already
        self._whole = True

    def started(self, cached_tokens: int) -> None:
        self._sink.started(cached_tokens)

    def push(self, generation: pb.Generation) -> FinishReason | None:
        self._whole = self._whole and not generation.hidden
        if not self._repeated:
            self._metrics.generated(len(generation.token_ids))
            if self._whole:
                self._answer.known.MergeFrom(generation)
                self._answer.known.ClearField("drafted")  # it is said of a step's first token
        self._repeated = False
        self._answer.expires = self._clock() + self._seconds
        self._missing -= len(generation.token_ids)
        return self._sink.push(generation) or (FinishReason.LENGTH if self._missing <= 0 else None)

    def finished(self, reason: FinishReason) -> None:
        self._answer.writer = None
        self._sink.finished(reason)

    def failed(self, error: RouterError) -> None:
        self._answer.writer = None
        self._sink.failed(error)


def _name(sequence: Sequence) -> tuple[str, str]:
    keep = sequence.request.keep
    return sequence.request.cache_namespace, keep.name if keep is not None else ""


def _digest(sequence: Sequence) -> bytes:
    """Returns a digest of everything that determines the tokens of a request that has not joined a batch yet."""
    request, message = sequence.request, pb.Request()
    message.CopyFrom(sequence.message)
    message.id = 0
    message.logprobs = False
    message.ClearField("trace_context")
    if not message.sampling.do_sample:
        message.sampling.seed = 0
    grammar = request.options.grammar
    pieces = [
        request.cache_namespace.encode(),
        message.SerializeToString(deterministic=True),
        b"" if grammar is None else grammar_to_message(grammar).SerializeToString(deterministic=True),
        *(b"%d %d %s" % (image.start, image.length, image.digest) for image in request.images),
    ]
    digest = sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.digest()
