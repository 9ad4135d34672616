"""Generating for a list of prompts at once, without a server.

    python -m tgi_server.engine.offline "Tell me how to boil an egg." "What is a chisel for?"

In Python:

    engine = Engine(EngineConfig(Path("my-model")))
    outputs = generate(engine, [[1, 52, 17], [1, 9]], StoppingParameters(max_new_tokens=32))
"""

import argparse
import logging
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from tgi_server import demo_model
from tgi_server.contract import SamplingParameters, StoppingParameters
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.engine import Engine, Step
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.sequence import RunningSequence

BATCH_ID = 1


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stopping: StoppingParameters,
    sampling: SamplingParameters | None = None,
    *,
    max_batch_size: int = 32,
    max_prefill_tokens: int = 2048,
) -> list[list[int]]:
    """Token ids generated for each prompt, in the order of the prompts; an end-of-sequence token comes last.

    As many prompts run together as fit; each has its blocks from the start, so none is ever interrupted.
    Raises InvalidCall for a prompt that does not fit, NotEnoughMemory when nothing does.
    """
    capacity = engine.warm_up(max_batch_size, max_prefill_tokens)
    run = _Run(engine, capacity, max_batch_size, max_prefill_tokens)
    for index, prompt in enumerate(prompts):
        run.add(RunningSequence(index, list(prompt), stopping, sampling or SamplingParameters()))
    return run.finish()


class _Run:
    """First come, first served: the oldest waiting prompt joins as soon as a row and its blocks are free."""

    def __init__(self, engine: Engine, capacity: CacheCapacity, max_batch_size: int, max_prefill_tokens: int) -> None:
        self._engine = engine
        self._capacity = capacity
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._free = list(range(capacity.num_blocks, 0, -1))
        self._waiting: deque[RunningSequence] = deque()
        self._outputs: list[list[int]] = []
        self._blocks: dict[int, list[int]] = {}

    def add(self, sequence: RunningSequence) -> None:
        total = len(sequence.input_ids) + sequence.stopping.max_new_tokens
        if total > self._capacity.max_total_tokens:
            raise InvalidCall(
                f"prompt {sequence.request_id} may grow to {total} tokens; at most "
                f"{self._capacity.max_total_tokens} fit"
            )
        self._waiting.append(sequence)
        self._outputs.append([])

    def finish(self) -> list[list[int]]:
        while self._waiting or self._engine.batch:
            joining = self._admit()
            if joining:
                chunks = [(sequence.request_id, sequence.remaining) for sequence in joining]
                self._collect(self._engine.step(BATCH_ID, joining, chunks))
            else:
                self._collect(self._engine.step(BATCH_ID))
        return self._outputs

    def _admit(self) -> list[RunningSequence]:
        joining: list[RunningSequence] = []
        tokens = 0
        while self._waiting and len(self._blocks) < self._max_batch_size:
            sequence = self._waiting[0]
            needed = self._blocks_needed(sequence)
            tokens += sequence.remaining
            if needed > len(self._free) or (joining and tokens > self._max_prefill_tokens):
                break
            sequence.blocks = [self._free.pop() for _ in range(needed)]
            self._blocks[sequence.request_id] = sequence.blocks
            joining.append(self._waiting.popleft())
        return joining

    def _blocks_needed(self, sequence: RunningSequence) -> int:
        if not self._engine.info.paged:
            return 0
        return -(-(len(sequence.input_ids) + sequence.stopping.max_new_tokens) // self._capacity.block_size)

    def _collect(self, step: Step) -> None:
        for generation in step.collect().generations:
            self._outputs[generation.request_id].append(generation.token_id)
            if generation.finish_reason:
                self._free.extend(self._blocks.pop(generation.request_id))


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates text for prompts, all in one batch, without a server.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", type=Path, default=demo_model.PATH, help="a folder in transformers format")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as saved, if this machine is fast at it")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="sample instead of taking the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")
    engine = Engine(EngineConfig(arguments.model, dtype=DTYPES.get(arguments.dtype)))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    sampling = (
        SamplingParameters(do_sample=True, temperature=arguments.temperature, seed=arguments.seed)
        if arguments.temperature
        else SamplingParameters()
    )
    started = time.perf_counter()
    outputs = generate(
        engine,
        [tokenizer(prompt)["input_ids"] for prompt in arguments.prompts],
        StoppingParameters(arguments.max_new_tokens),
        sampling,
    )
    seconds = time.perf_counter() - started
    for prompt, output in zip(arguments.prompts, outputs, strict=True):
        print(f"{prompt}\n-> {tokenizer.decode(output, skip_special_tokens=True)}\n")
    print(f"{sum(map(len, outputs))} tokens in {seconds:.2f} s, start of the cache included")


if __name__ == "__main__":
    main()
