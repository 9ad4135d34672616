"""Runs sequences through an engine without a server: gives them rows and KV blocks, and collects their tokens."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tgi_server.contract import FinishReason
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import NotEnoughMemory
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.step import Generation, Step

BATCH_ID = 1


@dataclass(slots=True)
class Output:
    """The tokens that one sequence got from each step, hidden ones and the end-of-sequence token included."""

    generations: list[Generation] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for generation in self.generations for token in (generation.token_id, *generation.jump_forward)]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.generations[-1].finish_reason if self.generations else None

    @property
    def error(self) -> str | None:
        return self.generations[-1].error if self.generations else None


class Driver:
    """First come, first served: the oldest waiting sequence joins as soon as a row and its blocks are free.

    outputs: the outputs by request id, also of sequences that have ended. drafted, accepted: number of drafted tokens,
    and of those that were accepted.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_prefill_tokens: int | None = None,
        blocks: Iterable[int] | None = None,
        grow: bool = False,
    ) -> None:
        """engine: a warmed-up engine, whose batch is dropped. max_prefill_tokens: maximum number of tokens of prompts
        that join in one step; None: unlimited. blocks: the KV blocks to use, in this order; None: all. grow: sequences
        get another block when they need one, and are never preempted; otherwise they join with all blocks that they may
        need.
        """
        engine.clear()
        self.engine = engine
        self.outputs: dict[int, Output] = {}
        self.drafted = self.accepted = 0
        self._max_prefill_tokens = max_prefill_tokens
        self._grow = grow
        self._free = deque(range(1, engine.capacity.num_blocks + 1) if blocks is None else blocks)
        self._waiting: deque[RunningSequence] = deque()
        self._running: dict[int, RunningSequence] = {}
        self._chunks: dict[int, list[int]] = {}  # tokens of the chunks that each prompt still has before it
        self._lent: set[int] = set()  # requests whose blocks are the driver's

    def add(self, sequence: RunningSequence, chunks: Sequence[int] = ()) -> Output:
        """Queues a sequence. One that has blocks already keeps them to itself.

        chunks: tokens of the chunks in which its prompt is computed, one chunk a step; empty: all in one step.
        """
        self._waiting.append(sequence)
        self._chunks[sequence.request_id] = list(chunks) or [sequence.remaining]
        self.outputs[sequence.request_id] = output = Output()
        return output

    @property
    def busy(self) -> bool:
        """Returns True while a sequence waits or runs."""
        return bool(self._waiting or self.engine.batch)

    @property
    def waiting(self) -> bool:
        """Returns True while a sequence has not joined."""
        return bool(self._waiting)

    def run(self, *sequences: RunningSequence) -> list[Output]:
        """Adds some sequences, and runs steps until none waits or runs. Returns their outputs."""
        outputs = [self.add(sequence) for sequence in sequences]
        while self.busy:
            self.step()
        return outputs

    def step(self, *, decode: bool = True) -> list[Generation]:
        return self.take(self.start(decode=decode))

    def start(self, *, decode: bool = True) -> Step:
        """Starts a step in which waiting sequences join, and each prompt has its next chunk computed.

        Raises NotEnoughMemory when nothing runs and the sequence that waits longest does not fit.
        """
        joining = self._admit()
        chunks = [(request_id, self._chunks[request_id].pop(0)) for request_id in self._running & self._chunks.keys()]
        self._chunks = {request_id: left for request_id, left in self._chunks.items() if left}
        return self.engine.step(BATCH_ID, joining, chunks, self._grants(), decode=decode)

    def take(self, step: Step) -> list[Generation]:
        """Waits for a step's tokens. Call it in the order of starting."""
        result = step.collect()
        self.drafted += result.drafted
        self.accepted += result.accepted
        for generation in result.generations:
            if generation.request_id not in self._running:
                continue  # it has left meanwhile
            self.outputs[generation.request_id].generations.append(generation)
            if generation.finish_reason or generation.error:
                self._release(generation.request_id)
        return result.generations

    def leave(self, *request_ids: int) -> None:
        """Removes running sequences from the batch before their end."""
        for request_id in request_ids:
            self._release(request_id)
        self.engine.keep(BATCH_ID, list(self._running))

    def _admit(self) -> list[RunningSequence]:
        joining: list[RunningSequence] = []
        tokens = 0
        while self._waiting and len(self._running) < self.engine.capacity.max_batch_size:
            sequence = self._waiting[0]
            tokens += sequence.remaining
            needed = self._blocks_needed(sequence)
            too_many = self._max_prefill_tokens is not None and tokens > self._max_prefill_tokens
            if needed > len(self._free) and not self._running:
                raise NotEnoughMemory(
                    f"request {sequence.request_id} needs {needed} KV blocks; the cache has {len(self._free)}"
                )
            if needed > len(self._free) or (joining and too_many):
                break
            if not sequence.blocks:
                sequence.blocks = [self._free.popleft() for _ in range(needed)]
                self._lent.add(sequence.request_id)
            self._running[sequence.request_id] = sequence
            joining.append(self._waiting.popleft())
        return joining

    def _blocks_needed(self, sequence: RunningSequence) -> int:
        if sequence.blocks or not self.engine.info.paged:
            return 0
        total = len(sequence.input_ids) + sequence.stopping.max_new_tokens
        return -(-(len(sequence.known) if self._grow else total) // self.engine.info.block_size)

    def _grants(self) -> list[tuple[int, list[int]]]:
        if not self._grow or not self.engine.info.paged:
            return []
        size = self.engine.info.block_size
        return [
            (sequence.request_id, [self._free.popleft()])
            for sequence in self._running.values()
            if len(sequence.blocks) * size < len(sequence.input_ids) + sequence.generated
        ]

    def _release(self, request_id: int) -> None:
        self._chunks.pop(request_id, None)
        sequence = self._running.pop(request_id, None)
        if sequence is not None and request_id in self._lent:
            self._lent.remove(request_id)
            self._free.extend(sequence.blocks)
