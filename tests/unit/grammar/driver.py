"""Runs sequences with grammars through an engine, as a server does."""

from collections.abc import Sequence
from typing import Any

from tgi_server import contract
from tgi_server.contract import Grammar, SamplingParameters
from tgi_server.engine import Engine, RunningSequence, driver
from tgi_server.engine.driver import Output
from tgi_server.grammar.tokenizer import GrammarTokenizer


class Driver(driver.Driver):
    """Gives each sequence blocks for all that it may become; or, if `scarce`, one block more when it needs one."""

    def __init__(self, engine: Engine, *, scarce: bool = False) -> None:
        super().__init__(engine, grow=scarce)

    @property
    def tokenizer(self) -> GrammarTokenizer:
        assert self.engine.grammars is not None
        return self.engine.grammars.tokenizer

    def sequence(
        self, prompt: Sequence[int], grammar: Grammar | None, new: int = 100, *, seed: int = 0, **options: Any
    ) -> RunningSequence:
        """Returns a sequence that samples, with a seed of its own."""
        if grammar is not None:
            assert self.engine.grammars is not None
            self.engine.grammars.check(grammar)
        stopping = contract.StoppingParameters(new, ignore_eos=options.pop("ignore_eos", False))
        sampling = options.pop("sampling", SamplingParameters(do_sample=True, seed=seed))
        request = len(self.outputs)
        self.outputs[request] = Output()
        return RunningSequence(request, list(prompt), stopping, sampling, grammar=grammar, **options)

    def join(self, *sequences: RunningSequence) -> None:
        for sequence in sequences:
            self.add(sequence)
        self.step()

    def visible(self, output: Output) -> list[int]:
        """Returns the tokens of the text, without hidden ones and the end."""
        return [
            token
            for each in output.generations
            for place, token in enumerate((each.token_id, *each.jump_forward))
            if place not in each.hidden and token not in self.tokenizer.eos
        ]

    def text(self, output: Output) -> str:
        return self.tokenizer.decode(self.visible(output))
