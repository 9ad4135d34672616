"""One request in the scheduler: its tokens, its progress, and the KV blocks that it holds."""

import asyncio
import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import BlockCopy, FinishReason
from tgi_server.router.errors import GrammarFailed, InvalidRequest, RequestTimedOut, RouterError
from tgi_server.router.scheduling import calls
from tgi_server.router.scheduling.adapter_registry import Adapter
from tgi_server.router.scheduling.image_places import ImagePlaces
from tgi_server.router.submission import PreparedRequest, Sink
from tgi_server.wire import finish_reason_from_message

logger = logging.getLogger(__name__)

# If all clients share the prefix cache, exact counts of cached tokens would let a client find out others' prompts by
# guessing. OpenAI's API rounds to the same multiple.
_CACHED_TOKENS_STEP = 128

# A request never overtakes one of its class that came this many seconds earlier, whatever the deadlines are.
_LONGEST_OVERTAKEN_S = 10.0
# A text with a deadline ends earlier by these seconds, or this share of its time, so that it arrives in time.
_LATEST_END_S, _LATEST_END_SHARE = 0.03, 0.05

# The end of a request: the reason, or the error that it failed with.
Outcome = FinishReason | RouterError

# A sink that uses a cancelled future raises CancelledError, which must not end the scheduler's task.
SINK_FAULTS = (Exception, asyncio.CancelledError)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. Knows nothing of other requests. Its state changes only through its methods.

    speculates: True if the shards draft tokens, so that one step may yield several. adapter: its LoRA adapter, or None.
    message: the message that the shards receive when it joins their batch. size: bytes of message, grammar and images.
    images: the images of its prompt.
    tokens: ids of the prompt's and the generated tokens, as 32-bit numbers. prompt_tokens: number of the prompt's.
        max_total_tokens: maximum number of all. known: number of all on admission; the step that computes the last of
        them yields the next token.
    computed: number of known tokens whose keys and values are in the blocks once the calls sent so far are done. It
        stays at `known` later, although each step then computes one more token.
    blocks: the block table, as in the shards. cached: number of tokens that were in its first blocks on admission.
    first_step: the step that computes the last known token and yields the next. From then on each step computes the
        token that the step before has yielded.
    newest: number of tokens of its last generation; perhaps no step has computed them yet.
    save_lengths: lengths of its prompt at which to save the states in a snapshot. saved: length of the last snapshot.
    likely_cached: number of known tokens that were cached when it was queued; 0 once it has joined. on_disk: the same,
        if some of them have to be read from disk; otherwise 0.
    without_place_since: the step at which it was first found to wait for its adapter; None: it has not waited.
    submitted_at: seconds of the scheduler's clock. place: sort key for the order of serving: by class, lower first,
    then
        by deadline. closing: True if its grammar is completing the text.
    """

    request: PreparedRequest
    sink: Sink
    speculates: bool = False
    adapter: Adapter | None = None
    submitted_at: float = 0.0
    place: tuple[int, float, int] = field(init=False)
    closing: bool = False
    message: pb.Request = field(init=False)
    size: int = field(init=False)
    tokens: "array[int]" = field(init=False)
    images: ImagePlaces = field(init=False)
    known: int = field(init=False)
    prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    first_step: int | None = None
    newest: int = 1
    save_lengths: list[int] = field(default_factory=list)
    saved: int = 0
    likely_cached: int = 0
    on_disk: int = 0
    started: bool = False
    without_place_since: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest if the request has a value that a message to the shards cannot hold."""
        try:
            self.message = calls.request_message(self.request, self.adapter.key if self.adapter else "")
            self.tokens = array("I", self.request.input_ids)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(f"the request has a value that the shards cannot take: {error}") from error
        grammar = self.request.options.grammar
        self.size = self.message.ByteSize() + (grammar.size if grammar is not None else 0)
        self.size += sum(len(tensor.data) for image in self.request.images for tensor in image.tensors)
        self.images = ImagePlaces(self.request.images)
        self.known = self.prompt_tokens = len(self.tokens)
        self.max_total_tokens = self.prompt_tokens + self.request.options.stopping.max_new_tokens
        due = min(self.deadline, self.submitted_at + _LONGEST_OVERTAKEN_S)
        self.place = self.request.options.priority, due, self.request.id

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def priority(self) -> int:
        return self.request.options.priority

    @property
    def most_generated(self) -> int:
        return self.max_total_tokens - self.prompt_tokens

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def deadline(self) -> float:
        """The time after which its next token is useless."""
        request, deadline = self.request, self.request.deadline
        if self.ends_early and not self.closing:
            deadline -= min(_LATEST_END_S, _LATEST_END_SHARE * (deadline - self.submitted_at))
        return deadline if self.generated else min(deadline, request.first_token_by)

    @property
    def ends_early(self) -> bool:
        """True if its text, as it is or completed by its grammar, is to be returned before the deadline."""
        return self.request.options.on_timeout in ("partial", "complete") and isfinite(self.request.deadline)

    @property
    def closes(self) -> bool:
        """True if its grammar has to complete the text before the deadline."""
        options = self.request.options
        return options.on_timeout == "complete" and options.grammar is not None and isfinite(self.request.deadline)

    def close(self) -> None:
        """Records that the shards have been told to complete the text by its grammar."""
        self.closing = True

    def time_up(self) -> Outcome:
        """Returns how the request ends at its deadline."""
        if self.ends_early and self.generated:
            return FinishReason.DEADLINE
        return RequestTimedOut(f"the deadline of the request has passed; {self._answered()}")

    def progress(self) -> str:
        """Returns a text about the request's progress, for the log. Clients could infer others' prompts from it."""
        if not self.started or self.generated:
            return self._answered()
        return f"{self.computed:,} of {self.prompt_tokens:,} tokens of its prompt were computed"

    def _answered(self) -> str:
        """Returns a text about the number of generated tokens."""
        if not self.started:
            return "it waited for a place in a batch"
        return f"it has {self.generated} of at most {self.most_generated} tokens"

    def beginning(self, tokens: int) -> bytes:
        """Returns the first tokens for the prefix cache, 4 bytes each, with image digests in place of image tokens."""
        return self.images.keyed(self.tokens[:tokens].tobytes())

    @property
    def jumps(self) -> bool:
        """True if one step may yield several tokens: drafted tokens, or jump-forward tokens of its grammar."""
        return self.speculates or self.request.options.grammar is not None

    @property
    def reports_prompt(self) -> bool:
        """True if the logprobs of its prompt have to be reported, so that all of the prompt has to be computed."""
        return self.request.options.report.prefill_logprobs and self.generated == 0

    @property
    def remaining(self) -> int:
        """Number of known tokens that no call has computed yet."""
        return self.known - self.computed

    @property
    def to_compute(self) -> int:
        """Number of known tokens that probably have to be computed before its next token."""
        return self.remaining - self.likely_cached

    @property
    def last_step(self) -> int:
        """The step that yields the sequence's last token, unless it ends earlier."""
        assert self.first_step is not None
        return self.first_step + self.max_total_tokens - self.known - 1

    @property
    def settled(self) -> int:
        """Number of tokens whose keys and values are certainly in the blocks once all calls sent so far are done.

        The newest tokens are not counted: the step that would compute them may never be sent.
        """
        return self.computed if self.first_step is None else len(self.tokens) - self.newest

    def full_step(self, block_size: int) -> int | None:
        """Returns the step for which the sequence needs its next block; None if it ends earlier.

        `first_step` computes position `known` - 1, and each later step the next position.
        """
        assert self.first_step is not None
        step = self.first_step + len(self.blocks) * block_size - (self.known - 1)
        return step if step <= self.last_step else None

    def wait_for_place(self, step: int) -> None:
        """Records the step at which it was first found to wait for its adapter."""
        if self.without_place_since is None:
            self.without_place_since = step

    def admit(
        self,
        blocks: Iterable[int] = (),
        cached: int = 0,
        copy: BlockCopy | None = None,
        earlier_reply: Iterable[int] = (),
        snapshot: int = 0,
    ) -> None:
        """Gives the sequence blocks for its known tokens, with which it joins the shards' batch.

        cached: number of known tokens that are in them already. copy: block copy to make before anything is computed.
        earlier_reply: tokens of an earlier reply to the same prompt, as a draft. snapshot: number of the snapshot of
        the states after the cached tokens; 0: there is none.
        """
        self.blocks = list(blocks)
        self.cached = self.computed = cached
        self.likely_cached = 0
        self.without_place_since = None
        calls.complete_request(
            self.message,
            generated_ids=self.tokens[self.prompt_tokens :],
            block_ids=self.blocks,
            cached_tokens=cached,
            copy=copy,
            prefill_logprobs=self.reports_prompt,
            earlier_reply=earlier_reply,
            closing=self.closing,
            snapshot=snapshot,
        )

    def start(self) -> bool:
        """Notifies the sink that the request has left the queue. Returns False if that was done before a preemption."""
        if self.started:
            return False
        self.started = True
        shared = not self.request.cache_namespace
        self.sink.started(self.cached - self.cached % _CACHED_TOKENS_STEP if shared else self.cached)
        return True

    def find_prompt(self) -> None:
        """Counts the whole prompt as cached: the beginning of the answer is known from an early answer."""
        self.cached = self.prompt_tokens

    def send_to(self, sink: Sink) -> None:
        """Sends its tokens to `sink` from now on."""
        self.sink = sink

    def compute(self, tokens: int, step: int) -> None:
        """Records that step `step` computes the next `tokens` known tokens."""
        self.computed += tokens
        if self.remaining == 0:
            self.first_step = step

    def grow(self, block: int) -> None:
        """Appends a block to the block table."""
        self.blocks.append(block)

    def advance(self, generation: pb.Generation) -> Outcome | None:
        """Appends the tokens that a step yielded, and pushes the visible ones into the sink.

        Returns how the request ends with them; None if it continues.
        """
        if token_ids := generation.token_ids:  # a sequence may fail without any
            self.tokens.extend(token_ids)
            self.newest = len(token_ids)
        if generation.error:
            return GrammarFailed(f"the grammar could not be followed: {generation.error}")
        if self.closing and generation.finish_reason == pb.FINISH_REASON_EOS_TOKEN:
            generation.finish_reason = pb.FINISH_REASON_DEADLINE
        if generation.hidden:
            _drop_hidden(generation)
        try:
            stop = self.sink.push(generation)
        except SINK_FAULTS:
            logger.exception("the tokens of request %d could not be handled", self.id)
            return RouterError("the generated tokens could not be handled")
        return finish_reason_from_message(generation.finish_reason) or stop

    def preempt(self) -> None:
        """Resets the sequence for the queue. Its tokens are computed again, except those in the prefix cache."""
        self.known = len(self.tokens)
        self.computed = self.cached = 0
        self.blocks = []
        self.first_step = None
        self.newest = 1

    def finish(self, outcome: Outcome | None) -> None:
        """Notifies the sink of the end of the request. outcome: None, without a notification: its client has left."""
        if outcome is not None:
            tell_end(self.request.id, self.sink, outcome)


def tell_end(request_id: int, sink: Sink, outcome: Outcome) -> None:
    """Notifies the sink of a request of its end. An exception of the sink is logged and affects no other request."""
    try:
        if isinstance(outcome, FinishReason):
            sink.finished(outcome)
        else:
            sink.failed(outcome)
    except SINK_FAULTS:
        logger.exception("the end of request %d could not be handled", request_id)
        if isinstance(outcome, FinishReason):
            tell_end(request_id, sink, RouterError("the end of the generation could not be handled"))


def _drop_hidden(generation: pb.Generation) -> None:
    """Removes the tokens that only the model sees (hints) from those of a step."""
    for place in reversed(generation.hidden):
        del generation.token_ids[place]
        if generation.logprobs:
            del generation.logprobs[place]
        if generation.top_tokens:
            del generation.top_tokens[place]
