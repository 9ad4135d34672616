"""One request as the scheduler sees it: its tokens, how far it is, and the KV blocks that it holds."""

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

# Where everybody shares the prefix cache, exact numbers would reveal others' prompts, guess by guess. OpenAI
# counts cached tokens in the same steps.
_CACHED_TOKENS_STEP = 128

# A request that comes so much later than another of its class never overtakes it, whatever its deadline is.
_LONGEST_OVERTAKEN_S = 10.0

# A text that ends before its deadline does so by these seconds, or this share of its time, so that it arrives.
_LATEST_END_S, _LATEST_END_SHARE = 0.03, 0.05

# The end of a request: the reason, or the error that it failed with.
Outcome = FinishReason | RouterError

# A sink that asks a cancelled future raises CancelledError, which must not end the scheduler's task.
SINK_FAULTS = (Exception, asyncio.CancelledError)


@dataclass(slots=True, eq=False)
class Sequence:
    """Knows nothing of other requests. Its state changes only through its methods.

    speculates: one step may yield several tokens, which the shards drafted and found right.
    adapter: the one that computes it beside the model, if any.
    message: what the shards receive when it joins their batch. size: bytes of that, its grammar and its images.
    images: of its prompt.
    tokens: the prompt and what has been generated, as 32-bit numbers. prompt_tokens, max_total_tokens: how many the
        prompt has, and how many there may be in the end. known: how many there were on admission; the
        step that computes the last of them yields the next token.
    computed: known tokens whose keys and values are in the blocks once the calls sent so far are done. It stops at
        `known`: from then on each step computes one more, which is not counted here.
    blocks: the block table as the shards know it. cached: tokens that were found in its first blocks on admission.
    first_step: the step that computes the last known token and yields the next; from then on each step computes the
        token that the one before it yielded.
    newest: tokens of its last generation; perhaps no step has computed them yet.
    save_lengths: of its prompt, at which its states are worth a snapshot. saved: the length of the last snapshot since.
    likely_cached: known tokens that were cached when it was queued; 0 once it has joined. on_disk: the same, if some
        of them are to be read from disk; 0: none are.
    without_place_since: the step at which there was no place for its adapter; None: it has not waited for one.
    submitted_at: in seconds of the scheduler's clock. place: sequences are served in this order, a lower class before
        a higher one, and within it the earlier deadline. closing: its grammar is ending the text.
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
        """Raises InvalidRequest for a request that no message to the shards can hold."""
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
        """True if its text ends before the deadline as it is, or whole, and arrives in time."""
        return self.request.options.on_timeout in ("partial", "complete") and isfinite(self.request.deadline)

    @property
    def closes(self) -> bool:
        """True if its grammar is to end the text before the deadline."""
        options = self.request.options
        return options.on_timeout == "complete" and options.grammar is not None and isfinite(self.request.deadline)

    def close(self) -> None:
        """Notes that the shards have its grammar end the text."""
        self.closing = True

    def time_up(self) -> Outcome:
        """Returns how the request ends at its deadline."""
        if self.ends_early and self.generated:
            return FinishReason.DEADLINE
        return RequestTimedOut(f"the deadline of the request has passed; {self._answered()}")

    def progress(self) -> str:
        """Returns how far the request has come, for the log: clients could tell from it what others' prompts say."""
        if not self.started or self.generated:
            return self._answered()
        return f"{self.computed:,} of {self.prompt_tokens:,} tokens of its prompt were computed"

    def _answered(self) -> str:
        """Returns how many tokens have been generated."""
        if not self.started:
            return "it waited for a place in a batch"
        return f"it has {self.generated} of at most {self.most_generated} tokens"

    def beginning(self, tokens: int) -> bytes:
        """Returns the first tokens, 4 bytes each, as the prefix cache has them: in an image by what it shows."""
        return self.images.keyed(self.tokens[:tokens].tobytes())

    @property
    def jumps(self) -> bool:
        """True if one step may yield several tokens: drafted ones, or such as its grammar leaves no choice about."""
        return self.speculates or self.request.options.grammar is not None

    @property
    def reports_prompt(self) -> bool:
        """True if the logprobs of its prompt are still to be reported, so that all of it has to be computed."""
        return self.request.options.report.prefill_logprobs and self.generated == 0

    @property
    def remaining(self) -> int:
        """Known tokens that no call has computed yet."""
        return self.known - self.computed

    @property
    def to_compute(self) -> int:
        """Known tokens that are likely to be computed before its next token."""
        return self.remaining - self.likely_cached

    @property
    def last_step(self) -> int:
        """The step that yields the sequence's last token, unless it ends before."""
        assert self.first_step is not None
        return self.first_step + self.max_total_tokens - self.known - 1

    @property
    def settled(self) -> int:
        """Tokens whose keys and values are surely in the blocks once all calls sent so far are done.

        Those of the newest tokens are not: the step that would compute them may never be sent.
        """
        return self.computed if self.first_step is None else len(self.tokens) - self.newest

    def full_step(self, block_size: int) -> int | None:
        """Returns the step for which the sequence needs its next block; None if it ends before.

        `first_step` computes position `known` - 1, each later step the position after.
        """
        assert self.first_step is not None
        step = self.first_step + len(self.blocks) * block_size - (self.known - 1)
        return step if step <= self.last_step else None

    def wait_for_place(self, step: int) -> None:
        """Notes at which step it was first found to wait for its adapter."""
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
        """Gives the sequence the blocks of its known tokens, with which it joins the shards' batch.

        cached: known tokens that are in them already. copy: made before anything is computed.
        earlier_reply: the beginning of a reply to the same prompt. snapshot: the number of the one after the cached
        tokens.
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
        """Tells the sink that the request has left the queue. Returns False after a preemption: then it knows."""
        if self.started:
            return False
        self.started = True
        shared = not self.request.cache_namespace
        self.sink.started(self.cached - self.cached % _CACHED_TOKENS_STEP if shared else self.cached)
        return True

    def find_prompt(self) -> None:
        """Notes that its prompt has been computed for the beginning of its answer, which is known."""
        self.cached = self.prompt_tokens

    def send_to(self, sink: Sink) -> None:
        """Has `sink` receive its tokens from now on."""
        self.sink = sink

    def compute(self, tokens: int, step: int) -> None:
        """Notes that step `step` computes the next `tokens` known tokens."""
        self.computed += tokens
        if self.remaining == 0:
            self.first_step = step

    def grow(self, block: int) -> None:
        """Gives the sequence one block more."""
        self.blocks.append(block)

    def advance(self, generation: pb.Generation) -> Outcome | None:
        """Takes the tokens that a step yielded, and pushes the visible ones into the sink.

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
        """Sends the sequence back to the queue. Its tokens are computed again, but for those in the prefix cache."""
        self.known = len(self.tokens)
        self.computed = self.cached = 0
        self.blocks = []
        self.first_step = None
        self.newest = 1

    def finish(self, outcome: Outcome | None) -> None:
        """Tells the sink how the request ended. outcome: None if its client has left."""
        if outcome is not None:
            tell_end(self.request.id, self.sink, outcome)


def tell_end(request_id: int, sink: Sink, outcome: Outcome) -> None:
    """Tells the sink of a request how it ended. A sink that raises affects no other request."""
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
    """Removes the tokens that only the model sees from a step's."""
    for place in reversed(generation.hidden):
        del generation.token_ids[place]
        if generation.logprobs:
            del generation.logprobs[place]
        if generation.top_tokens:
            del generation.top_tokens[place]
