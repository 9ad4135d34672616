"""What the shards answered, brought to the requests' sinks; and the end of requests, however they end."""

import asyncio
import logging

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.errors import GenerationFailed, GrammarFailed, RouterError
from tgi_server.router.request import ValidRequest
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.memory import Memory
from tgi_server.router.scheduling.queue import WaitingQueue
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.wire import finish_reason_from_message

logger = logging.getLogger(__name__)

# A sink that asks a cancelled future raises CancelledError, which must not end the scheduler's task.
_SINK_FAULTS = (Exception, asyncio.CancelledError)


class Delivery:
    """Takes sequences out of the batch when they end, and gives back what they held.

    Whatever goes wrong with one of them ends that one.
    """

    def __init__(self, queue: WaitingQueue, batch: Batch, memory: Memory) -> None:
        self._queue = queue
        self._batch = batch
        self._memory = memory

    def started(self, sequence: Sequence) -> None:
        """Tells the sink that the sequence has left the queue for the first time."""
        try:
            sequence.started = True
            sequence.request.sink.started()
        except _SINK_FAULTS:
            logger.exception("the start of request %d could not be handled", sequence.id)
            self.fail(sequence, RouterError("the start of the generation could not be handled"))

    def deliver(self, step: pb.StepResponse) -> None:
        """Hands on each token. A sequence that has left meanwhile is passed over: nobody waits for its tokens."""
        self._batch.answered += 1
        for generation in step.generations:
            sequence = self._batch.get(generation.request_id)
            if sequence is None:
                continue
            try:
                self._take(sequence, generation)
            except Exception:
                logger.exception("the tokens of request %d could not be booked", sequence.id)
                self.fault(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Its client is gone."""
        self._leave(sequence, ended_by_shards=False)

    def fail(self, sequence: Sequence, error: RouterError) -> None:
        if self._leave(sequence, ended_by_shards=False):
            tell_failure(sequence.request, error)

    def fault(self, sequence: Sequence) -> None:
        """Fails a sequence, waiting or running, whose books nobody can trust any more: they are made anew."""
        self._queue.cancel(sequence.id)
        self._batch.leave(sequence, ended_by_shards=False)
        self._memory.rebuild(self._batch)
        tell_failure(sequence.request, GenerationFailed("the request could not be scheduled"))

    def fail_all(self, error: RouterError) -> None:
        """The shards have lost the batch, and with it all that is cached."""
        sequences = list(self._batch)
        self._batch.reset()
        self._memory.rebuild(())
        for sequence in sequences:
            tell_failure(sequence.request, error)

    def _take(self, sequence: Sequence, generation: pb.Generation) -> None:
        sequence.advance(generation.token_ids)
        if generation.error:
            self.fail(sequence, GrammarFailed(f"the grammar could not be followed: {generation.error}"))
            return
        try:
            stop = _push(sequence, generation)
        except _SINK_FAULTS:
            logger.exception("the tokens of request %d could not be handled", sequence.id)
            self.fail(sequence, RouterError("the generated tokens could not be handled"))
            return
        reason = finish_reason_from_message(generation.finish_reason)
        if reason is not None:
            self._finish(sequence, reason, ended_by_shards=True)
        elif stop is not None:
            self._finish(sequence, stop, ended_by_shards=False)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, ended_by_shards: bool) -> None:
        if self._leave(sequence, ended_by_shards=ended_by_shards):
            try:
                sequence.request.sink.finished(reason)
            except _SINK_FAULTS:
                logger.exception("the end of request %d could not be handled", sequence.id)
                tell_failure(sequence.request, RouterError("the end of the generation could not be handled"))

    def _leave(self, sequence: Sequence, *, ended_by_shards: bool) -> bool:
        """Takes the sequence out of the batch, with what it held. Returns True if it was there."""
        if not self._batch.leave(sequence, ended_by_shards=ended_by_shards):
            return False
        try:
            self._memory.release(sequence)
        except Exception:
            logger.exception("the blocks of request %d could not be given back one by one", sequence.id)
            self._memory.rebuild(self._batch)
        return True


def _push(sequence: Sequence, generation: pb.Generation) -> FinishReason | None:
    """Without the tokens that only the model sees."""
    for place in reversed(generation.hidden):
        del generation.token_ids[place]
        if generation.logprobs:
            del generation.logprobs[place]
        if generation.top_tokens:
            del generation.top_tokens[place]
    return sequence.request.sink.push(generation)


def tell_failure(request: ValidRequest, error: RouterError) -> None:
    """Tells the sink, which must not stop the others from being told."""
    try:
        request.sink.failed(error)
    except _SINK_FAULTS:
        logger.exception("the failure of request %d could not be handled", request.id)
