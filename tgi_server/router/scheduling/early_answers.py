"""Answers that are generated before they are requested, in the background, for requests that are likely to come.

What the shards are told of a request determines its tokens. So the tokens of one that was told the same are its tokens,
with the same log-probabilities: it gets them at once, as if it had been preempted after them, and continues from there.
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

# Answers that are kept at once.
_MOST_ANSWERS = 64


@dataclass(slots=True, eq=False)
class _Answer:
    """The beginning of an answer.

    name: the cache namespace and the name of its prompt; an answer to another prompt of that name takes its place.
    known: its tokens, as if one step had yielded them. logprobs: they have log-probabilities. writer: the request that
    generates it; None: it is as long as it gets. expires: in seconds of the clock.
    """

    name: tuple[str, str]
    known: pb.Generation
    logprobs: bool
    writer: Sequence | None
    expires: float = inf


class EarlyAnswers:
    """Keeps the beginnings of answers, by digests of all that determines them, until they expire or are replaced."""

    def __init__(
        self,
        enter: Callable[[Sequence], None],
        start: Callable[[Sequence], bool],
        end: Callable[[Sequence, Outcome], Any],
        cancel: Callable[[int], str],
        metrics: EarlyAnswerMetrics,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """enter: queues a request. start: tells a request that it has begun; returns False if that ended it. end: ends
        a request. cancel: ends the request of an id without a word to it; returns nothing if it had ended. clock: in
        seconds.
        """
        self._enter = enter
        self._start = start
        self._end = end
        self._cancel = cancel
        self._metrics = metrics
        self._clock = clock
        self._answers: dict[bytes, _Answer] = {}  # the latest is the last
        self._beginning: dict[int, Sequence] = {}  # that get tokens as soon as their routes have submitted them

    def begin(self, sequence: Sequence) -> None:
        """Hands a new request what is known of its answer, and queues it.

        A request that generates an early answer is recorded. One that gets what another has generated ends that one.
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
        """Returns the request if it is about to get what is known."""
        return self._beginning.get(request_id)

    def leave(self, sequence: Sequence) -> None:
        """Notes that the request has ended."""
        self._beginning.pop(sequence.id, None)

    def forget(self, namespace: str) -> None:
        """Forgets the answers to requests of a cache namespace."""
        for key in [key for key, answer in self._answers.items() if answer.name[0] == namespace]:
            self._forget(key)

    def _hand_out(self, sequence: Sequence, known: pb.Generation) -> None:
        """Gives the request the known beginning of its answer, and queues it if that is not all."""
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
        """Has the tokens of a request be kept as an early answer. known: those that it begins with."""
        self._answers.pop(key, None)
        if len(self._answers) >= _MOST_ANSWERS:
            self._forget(next(iter(self._answers)))
        answer = _Answer(_name(sequence), pb.Generation(), sequence.request.options.report.logprobs, sequence)
        answer.known.CopyFrom(known)
        self._answers[key] = answer
        sequence.send_to(_EarlySink(sequence, answer, self._metrics, self._clock))

    def _stop_writing(self, answer: _Answer) -> None:
        """Ends the request that generates the answer: what it has is needed now, or will not be needed."""
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
    """Passes what a request gets to its sink, and keeps its tokens as an early answer, until there are enough.

    Only what comes before tokens that the model alone sees is kept: they are not among the tokens of a step any more.
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
    """Returns a digest of all that determines the tokens of a request that has not joined a batch yet."""
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
