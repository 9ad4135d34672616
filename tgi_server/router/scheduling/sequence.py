"""One request as the scheduler sees it: its tokens, how far it is, and the KV blocks that it holds."""

from array import array
from dataclasses import dataclass, field

from shared.stubs import generate_pb2 as pb
from tgi_server.router.grammar_message import grammar_message
from tgi_server.router.messages import ValidRequest


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `tokens` entries of block `source` are copied to block `target` before anything is computed."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Knows nothing of other requests.

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
        self.tokens = array("I", self.request.input_ids)
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

    def joining(self, lookahead: int) -> pb.Request:
        """The message with which it joins the shards' batch. lookahead: slots that forced tokens must leave free."""
        request = self.request
        message = pb.Request(
            id=request.id,
            input_ids=request.input_ids,
            generated_ids=self.tokens[self.prompt_tokens :],
            max_new_tokens=request.max_new_tokens,
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
            top_n_tokens=request.top_n_tokens,
            prefill_logprobs=request.prefill_logprobs and self.generated == 0,
            adapter_id=request.adapter_id or "",
            block_ids=self.blocks,
            cached_tokens=self.cached,
            lookahead=lookahead if self.leaps else 0,
            sampling=_sampling(request),
            trace_context=request.trace_context,
        )
        if request.grammar is not None:
            message.grammar.CopyFrom(grammar_message(request.grammar))
        if self.copy is not None:
            message.copy.CopyFrom(
                pb.BlockCopy(source=self.copy.source, target=self.copy.target, tokens=self.copy.tokens)
            )
        return message


def _sampling(request: ValidRequest) -> pb.SamplingParameters:
    sampling = request.sampling
    return pb.SamplingParameters(
        do_sample=sampling.do_sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
        watermark=sampling.watermark,
        logit_bias=sampling.logit_bias,
    )
