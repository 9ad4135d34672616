"""One request as the scheduler sees it: its tokens, how far it is, and the KV blocks that it holds."""

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import BlockCopy
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.request import ValidRequest
from tgi_server.wire import block_copy_to_message, grammar_to_message, sampling_to_message


@dataclass(slots=True, eq=False)
class Sequence:
    """Knows nothing of other requests.

    message: what the shards are told of it, but for its blocks: whatever protobuf refuses is refused here.
    tokens: the prompt and what has been generated, as 32-bit numbers. known: how many there were on admission; the
    step that computes the last of them yields the next token. computed: tokens whose keys and values the calls sent
    so far put into the blocks; counts up to `known` only, later ones follow from the steps.
    blocks: the block table as the shards know it. cached: tokens that were found in its first blocks on admission.
    copy: for the call that admits it.
    first_step: the step that computes the last known token and yields the next; from then on each step computes the
    token that the one before it yielded. full_at: the step for which it needs its next block. newest: how many tokens
    its last answered step yielded.
    """

    request: ValidRequest
    message: pb.Request = field(init=False)
    tokens: "array[int]" = field(init=False)
    known: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    copy: BlockCopy | None = None
    first_step: int | None = None
    full_at: int | None = None
    newest: int = 1
    started: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a request that cannot be told to the shards."""
        try:
            self.message = _message(self.request)
            self.tokens = array("I", self.request.input_ids)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(f"the request has a value that the shards cannot take: {error}") from error
        self.known = len(self.tokens)

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        return self.prompt_tokens + self.request.max_new_tokens

    @property
    def leaps(self) -> bool:
        """Whether one step may yield several tokens."""
        return self.request.grammar is not None

    @property
    def remaining(self) -> int:
        """Known tokens that no call has computed yet."""
        return self.known - self.computed

    @property
    def last_step(self) -> int:
        """The step that yields its last token at the latest, unless it ends before."""
        assert self.first_step is not None
        return self.first_step + self.max_total_tokens - self.known - 1

    @property
    def settled(self) -> int:
        """Tokens whose keys and values are surely in the blocks once all calls sent so far are done.

        Those of the newest tokens are not: the step that would compute them may never be sent.
        """
        return self.computed if self.first_step is None else len(self.tokens) - self.newest

    def reset(self) -> None:
        """Back to the queue: everything is to be computed anew, what was generated too."""
        self.known = len(self.tokens)
        self.computed = self.cached = 0
        self.blocks = []
        self.copy = self.first_step = self.full_at = None
        self.newest = 1

    def advance(self, token_ids: Collection[int]) -> None:
        """Takes the tokens that a step yielded. A step that failed yields none."""
        if token_ids:
            self.tokens.extend(token_ids)
            self.newest = len(token_ids)

    def join(self, lookahead: int) -> None:
        """Completes `message`, with which it joins the shards' batch.

        lookahead: slots that forced tokens must leave free.
        """
        message = self.message
        message.prefill_logprobs = self.request.prefill_logprobs and self.generated == 0
        message.cached_tokens = self.cached
        message.lookahead = lookahead if self.leaps else 0
        message.generated_ids[:] = self.tokens[self.prompt_tokens :]
        message.block_ids[:] = self.blocks
        message.ClearField("copy")
        if self.copy is not None:
            message.copy.CopyFrom(block_copy_to_message(self.copy))


def _message(request: ValidRequest) -> pb.Request:
    return pb.Request(
        id=request.id,
        input_ids=request.input_ids,
        max_new_tokens=request.max_new_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
        top_n_tokens=request.top_n_tokens,
        adapter_id=request.adapter_id or "",
        sampling=sampling_to_message(request.sampling),
        grammar=None if request.grammar is None else grammar_to_message(request.grammar),
        trace_context=request.trace_context,
    )
