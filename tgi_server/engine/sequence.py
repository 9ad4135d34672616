"""One request as the engine sees it: what to generate and how far it is. Knows nothing about tensors on devices."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.parameters import Grammar, ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine.results import PromptTokens


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `tokens` entries of block `source` are copied to `target` before anything is computed."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True)
class Sequence:
    """A request in a batch.

    input_ids: the prompt. generated_ids: what had been generated before a preemption.
    blocks: the block table so far. computed: tokens whose keys and values are in the cache.
    generated: tokens generated so far, those before a preemption included.
    prompt_report: what is reported of the prompt, until it has been.
    """

    request_id: int
    input_ids: list[int]
    stopping: StoppingParameters
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    report: ReportParameters = field(default_factory=ReportParameters)
    grammar: Grammar | None = None
    generated_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    copy: BlockCopy | None = None
    generated: int = 0
    known: Tensor = field(init=False)
    prompt_report: PromptTokens | None = None

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise InvalidCall(f"request {self.request_id} has no input tokens")
        self.known = torch.tensor(self.input_ids + self.generated_ids, dtype=torch.int64)
        self.generated = len(self.generated_ids)
        if self.computed >= len(self.known):
            raise InvalidCall(f"request {self.request_id}: at least its last token must be computed")

    @property
    def remaining(self) -> int:
        """Known tokens that have not been computed yet."""
        return len(self.known) - self.computed

    def next_chunk(self, tokens: int) -> Tensor:
        """The next `tokens` known tokens, [tokens] int64; they count as computed from here on."""
        if not 0 < tokens <= self.remaining:
            raise InvalidCall(f"request {self.request_id}: a chunk of {tokens} tokens, but {self.remaining} are left")
        chunk = self.known[self.computed : self.computed + tokens]
        self.computed += tokens
        return chunk
