"""One request in the engine: its tokens, its KV blocks, and how far it is. Knows nothing about tensors on devices."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tgi_server.contract import (
    BlockCopy,
    Grammar,
    Image,
    ReportParameters,
    SamplingParameters,
    StoppingParameters,
    ThoughtBudget,
)
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.vision.images import PromptImages
from tgi_server.grammar import Constraint, LimitedThoughts


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt, and the log-probability of each of its tokens after those before it; NaN for the first.

    top: the likeliest tokens (id, logprob) in the place of each, if requested; none for the first.
    """

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(slots=True, eq=False, weakref_slot=True)
class RunningSequence:
    """A request in a batch.

    input_ids: the prompt, which an encoder reads where there is one. generated_ids: the tokens generated so far, those
    before a preemption included. known: the prompt and those before a preemption, in this order.
    blocks: the block table so far. computed: tokens whose keys and values are in the cache.
    adapter_id: the id of its adapter; empty: none. adapter: the adapter's number in the engine; 0: none.
    state_slot: the slot of its recurrent states, in models that have such; 0: none. snapshot: the number of the
    snapshot with the state after the computed tokens, with which it joins; 0: none.
    earlier_reply: the beginning of a reply to an earlier request with the same prompt, if there is one.
    images: the prompt's images, in order. placed: the same at the positions of their tokens, once it has joined.
    fault: why the request cannot continue, which the step of its next token reports; empty: it can.
    constraint: the state of its grammar and of its reasoning budget; None without them, and once neither restricts the
    text any more.
    closing: its grammar is to end the text with few tokens.
    ended: its last token is known; it may be in the batch for a step or two more.
    jumping: the known tokens that are left to compute are jump-forward tokens.
    prompt_report: the report on the prompt, until it has been handed out.
    """

    request_id: int
    input_ids: list[int]
    stopping: StoppingParameters
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    report: ReportParameters = field(default_factory=ReportParameters)
    grammar: Grammar | None = None
    thought_budget: ThoughtBudget | None = None
    closing: bool = False
    generated_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    copy: BlockCopy | None = None
    adapter_id: str = ""
    adapter: int = 0
    state_slot: int = 0
    snapshot: int = 0
    earlier_reply: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    placed: PromptImages | None = None
    fault: str = ""
    known: Tensor = field(init=False)
    prompt_report: PromptTokens | None = None
    constraint: Constraint | LimitedThoughts | None = None
    jumping: bool = False
    ended: bool = False

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise InvalidCall(f"request {self.request_id} has no input tokens")
        self.generated_ids = list(self.generated_ids)
        self.known = torch.tensor(self.input_ids + self.generated_ids, dtype=torch.int64)
        if self.computed >= len(self.known):
            raise InvalidCall(f"request {self.request_id}: at least its last token must be computed")

    @property
    def remaining(self) -> int:
        """The number of known tokens that have not been computed yet."""
        return len(self.known) - self.computed

    @property
    def generated(self) -> int:
        """The number of tokens generated so far."""
        return len(self.generated_ids)

    @property
    def length(self) -> int:
        """The number of its tokens, those of the prompt and those generated so far."""
        return len(self.input_ids) + len(self.generated_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns its tokens from `start` to `stop` - 1, those of the prompt first."""
        prompt = len(self.input_ids)
        return self.input_ids[start:stop] + self.generated_ids[max(0, start - prompt) : max(0, stop - prompt)]

    def append(self, tokens: list[int]) -> None:
        """Adds tokens that were chosen."""
        self.generated_ids.extend(tokens)

    def jump_forward_room(self, block_size: int) -> int:
        """Returns how many jump-forward tokens have a slot after that of the last token."""
        slots = len(self.blocks) * block_size
        return max(0, slots - self.length - 1)

    def draft_room(self, block_size: int) -> int:
        """Returns how many tokens may be drafted: they have slots, and the last one is not among them."""
        return min(self.jump_forward_room(block_size), self.stopping.max_new_tokens - self.generated - 1)

    def jump(self, tokens: int) -> None:
        """Makes the last `tokens` tokens known ones: one that was chosen, and the jump-forward tokens after it."""
        known, total = len(self.known), self.length
        self.known = torch.cat([self.known, torch.tensor(self.generated_ids[known - total :], dtype=torch.int64)])
        self.report = replace(self.report, prefill_logprobs=False)
        self.computed = total - tokens
        self.jumping = True

    def next_chunk(self, tokens: int) -> Tensor:
        """Returns the next `tokens` known tokens, [tokens] int64; they count as computed from here on."""
        if not 0 < tokens <= self.remaining:
            raise InvalidCall(f"request {self.request_id}: a chunk of {tokens} tokens, but {self.remaining} are left")
        chunk = self.known[self.computed : self.computed + tokens]
        self.computed += tokens
        return chunk
