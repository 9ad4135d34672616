"""What the shards answered, brought to the requests' sinks; and the end of requests, however they end."""

import logging

from shared.stubs import generate_pb2 as pb
from tgi_server.router.errors import GrammarFailed, RouterError
from tgi_server.router.messages import FinishReason
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.memory import Memory
from tgi_server.router.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

_REASONS = {
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_EOS_TOKEN: FinishReason.EOS_TOKEN,
    pb.FINISH_REASON_STOP_SEQUENCE: FinishReason.STOP_SEQUENCE,
}


class Delivery:
    """Takes sequences out of the batch when they end, and gives back what they held."""

    def __init__(self, batch: Batch, memory: Memory) -> None:
        self._batch = batch
        self._memory = memory

    def deliver(self, step: pb.StepResponse) -> None:
        """Hands on each token. A sequence that has left meanwhile is passed over: nobody waits for its tokens."""
        self._batch.answered += 1
        for generation in step.generations:
            sequence = self._batch.get(generation.request_id)
            if sequence is None:
                continue
            sequence.tokens.extend(generation.token_ids)
            sequence.newest = len(generation.token_ids)
            if generation.error:
                self.fail(sequence, GrammarFailed(f"the grammar could not be followed: {generation.error}"))
                continue
            try:
                stop = _push(sequence, generation)
            except Exception:
                logger.exception("the tokens of request %d could not be handled", sequence.id)
                self.fail(sequence, RouterError("the generated tokens could not be handled"))
                continue
            if generation.finish_reason:
                self._finish(sequence, _REASONS[generation.finish_reason], ended_by_shards=True)
            elif stop is not None:
                self._finish(sequence, stop, ended_by_shards=False)

    def drop(self, sequence: Sequence) -> None:
        """Its client is gone."""
        if self._batch.leave(sequence, ended_by_shards=False):
            self._memory.release(sequence)

    def fail(self, sequence: Sequence, error: RouterError) -> None:
        if self._batch.leave(sequence, ended_by_shards=False):
            self._memory.release(sequence)
            tell_failure(sequence, error)

    def fail_all(self, error: RouterError) -> None:
        """The shards have lost the batch, and with it all that is cached."""
        sequences = list(self._batch)
        self._batch.reset()
        self._memory.reset()
        for sequence in sequences:
            tell_failure(sequence, error)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, ended_by_shards: bool) -> None:
        if self._batch.leave(sequence, ended_by_shards=ended_by_shards):
            self._memory.release(sequence)
            try:
                sequence.request.sink.finished(reason)
            except Exception:
                logger.exception("the end of request %d could not be handled", sequence.id)


def _push(sequence: Sequence, generation: pb.Generation) -> FinishReason | None:
    """Without the tokens that only the model sees."""
    for place in reversed(generation.hidden):
        del generation.token_ids[place]
        if generation.logprobs:
            del generation.logprobs[place]
        if generation.top_tokens:
            del generation.top_tokens[place]
    return sequence.request.sink.push(generation)


def tell_failure(sequence: Sequence, error: RouterError) -> None:
    """Tells the sink, which must not stop the others from being told."""
    try:
        sequence.request.sink.failed(error)
    except Exception:
        logger.exception("the failure of request %d could not be handled", sequence.id)
