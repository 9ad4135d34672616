"""Runs sequences with grammars through an engine, as a server does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tgi_server.contract import FinishReason, Grammar, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.grammar.tokenizer import GrammarTokenizer
from tgi_server.engine.step import Step

BATCH = 1


@dataclass(slots=True)
class Output:
    """tokens: all, hidden ones included. visible: those of the text, without its end."""

    tokens: list[int] = field(default_factory=list)
    visible: list[int] = field(default_factory=list)
    forced: int = 0
    steps: int = 0
    reason: FinishReason | None = None
    error: str | None = None


class Driver:
    """Gives each sequence blocks for all that it may become; or, if `scarce`, one block more when it needs one."""

    def __init__(self, engine: Engine, *, scarce: bool = False) -> None:
        engine.clear()
        self.engine = engine
        self.outputs: dict[int, Output] = {}
        self._scarce = scarce
        self._running: dict[int, RunningSequence] = {}
        self._next_block = 1

    @property
    def tokenizer(self) -> GrammarTokenizer:
        assert self.engine.grammars is not None
        return self.engine.grammars.tokenizer

    def sequence(
        self, prompt: Sequence[int], grammar: Grammar | None, new: int = 100, *, seed: int = 0, **options: Any
    ) -> RunningSequence:
        """It samples, with a seed of its own."""
        stopping = StoppingParameters(new, ignore_eos=options.pop("ignore_eos", False))
        sampling = options.pop("sampling", SamplingParameters(do_sample=True, seed=seed))
        request = len(self.outputs)
        sequence = RunningSequence(request, list(prompt), stopping, sampling, grammar=grammar, **options)
        known = len(sequence.known)
        sequence.blocks = self._blocks(known if self._scarce else len(prompt) + new)
        self.outputs[request] = Output()
        return sequence

    def run(self, *sequences: RunningSequence) -> list[Output]:
        """Until all have ended."""
        self.join(*sequences)
        while self.engine.batch:
            self.step()
        return [self.outputs[sequence.request_id] for sequence in sequences]

    def join(self, *sequences: RunningSequence) -> None:
        self._running |= {sequence.request_id: sequence for sequence in sequences}
        chunks = [(sequence.request_id, sequence.remaining) for sequence in sequences]
        self._take(self.engine.step(BATCH, sequences, chunks))

    def step(self) -> None:
        self._take(self.engine.step(BATCH, grants=self._grants()))

    def text(self, output: Output) -> str:
        return self.tokenizer.decode(output.visible)

    def _take(self, step: Step) -> None:
        for generation in step.collect().generations:
            output = self.outputs[generation.request_id]
            tokens = [generation.token_id, *generation.forced]
            output.steps += 1
            output.forced += len(generation.forced)
            output.tokens += tokens
            ends = self.tokenizer.eos
            output.visible += [
                token for place, token in enumerate(tokens) if place not in generation.hidden and token not in ends
            ]
            output.reason, output.error = generation.finish_reason, generation.error
            if output.reason or output.error:
                del self._running[generation.request_id]

    def _grants(self) -> list[tuple[int, list[int]]]:
        if not self._scarce:
            return []
        size = self.engine.info.block_size
        return [
            (sequence.request_id, self._blocks(1))
            for sequence in self._running.values()
            if len(sequence.blocks) * size < len(sequence.input_ids) + sequence.generated
        ]

    def _blocks(self, tokens: int) -> list[int]:
        count = -(-tokens // self.engine.info.block_size) if self.engine.info.paged else 0
        self._next_block += count
        return list(range(self._next_block - count, self._next_block))
