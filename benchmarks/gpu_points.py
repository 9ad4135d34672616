"""What is measured on a GPU: each number beside what `transformers` does and what the machine allows."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import PreTrainedModel

from benchmarks.bench import Bench
from benchmarks.floor import Machine
from benchmarks.large_model import Shape
from benchmarks.timing import synchronise
from tgi_server.contract import StoppingParameters
from tgi_server.engine.engine import Engine, Step
from tgi_server.engine.sequence import RunningSequence

_BATCH_ID = 1


@dataclass(frozen=True, slots=True)
class Load:
    """How much of everything. prefill: prompt tokens of a step."""

    context: int = 512
    requests: int = 256
    new_tokens: int = 256
    prefill: int = 8192
    conversation: int = 100_000
    turn: int = 256
    long_prompt: int = 32_768


FULL = Load()
SMALL = Load(context=32, requests=6, new_tokens=5, prefill=64, conversation=500, turn=16, long_prompt=256)


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured, and what it is to be. ours, peer, floor: in `unit`; None: there is none.

    value: what the target is about. lower: whether it is to be at most the target, not at least. times_peer: how many
    times as fast as the peer it is to be, too.
    """

    name: str
    unit: str
    ours: float
    peer: float | None
    floor: float | None
    value: float
    target: float
    lower: bool
    times_peer: float = 0.0
    note: str = ""

    @property
    def met(self) -> bool:
        in_reach = self.value <= self.target if self.lower else self.value >= self.target
        return in_reach and (self.peer is None or self.peer >= self.times_peer * self.ours)


def decode_one(engine: Engine, shape: Shape, machine: Machine, load: Load) -> Point:
    """A step of a single sequence. The peer's number is added by `with_peer`."""
    seconds = Bench(engine, load.context, steps=64, max_batch_size=1).decode_seconds(1)
    floor = (shape.cost.weight_bytes + shape.kv_bytes * load.context) / machine.bandwidth
    return Point("decode, batch 1", "ms/token", seconds * 1e3, None, floor * 1e3, seconds / floor, 1.25, lower=True)


def decode_many(engine: Engine, shape: Shape, machine: Machine, load: Load) -> Point:
    """All requests at once, to the end."""
    seconds = run_all(engine, prompts(load.requests, load.context, engine.info.vocab_size), load)
    floor = mix_floor(shape, machine, load)
    name = f"{load.requests} x {load.context} in, {load.new_tokens} out"
    return Point(name, "s", seconds, None, floor, seconds / floor, 1.5, lower=True, times_peer=2.0)


def second_turn(engine: Engine, load: Load) -> Point:
    """Time to the first token of a long conversation's second turn, as a share of that of the first."""
    total = load.conversation + load.turn + 8
    capacity = engine.warm_up(1, load.prefill, total)
    text = prompts(1, load.conversation + load.turn, engine.info.vocab_size)[0]
    blocks = list(range(1, capacity.num_blocks + 1))
    stopping = StoppingParameters(2, ignore_eos=True)
    first = _first_token(
        engine, RunningSequence(1, text[: load.conversation], stopping, blocks=list(blocks)), load.prefill
    )
    known = load.conversation - load.conversation % capacity.block_size
    again = RunningSequence(2, text, stopping, blocks=list(blocks), computed=known)
    second = _first_token(engine, again, load.prefill)
    name = f"first token, second turn of {load.conversation} tokens"
    return Point(
        name, "ms", second * 1e3, None, first * 1e3, second / first, 0.03, lower=True, note="floor: first turn"
    )


def prefill_long(engine: Engine, shape: Shape, machine: Machine, load: Load) -> Point:
    """The share of the matrix rate that one long prompt gets."""
    engine.warm_up(1, load.long_prompt, load.long_prompt + 8)
    blocks = list(range(1, 2 - (-load.long_prompt // engine.info.block_size)))
    text = prompts(1, load.long_prompt, engine.info.vocab_size)[0]
    times = []
    for _ in range(3):
        engine.clear()
        sequence = RunningSequence(1, text, StoppingParameters(2, ignore_eos=True), blocks=list(blocks))
        times.append(_first_token(engine, sequence, load.long_prompt))
    seconds, tokens = statistics.median(times), load.long_prompt
    flops = tokens * shape.cost.layer_flops + shape.cost.head_flops + shape.attention_flops * tokens**2 / 2
    floor = flops / machine.matrix_rate
    name = f"prefill of {tokens} tokens"
    return Point(name, "ms", seconds * 1e3, None, floor * 1e3, floor / seconds, 0.55, lower=False)


def run_all(engine: Engine, texts: Sequence[list[int]], load: Load) -> float:
    """Seconds until every prompt has its new tokens; a step is collected once the next one has been started."""
    total = load.context + load.new_tokens
    capacity = engine.warm_up(len(texts), load.prefill, total)
    each = -(-total // capacity.block_size) if engine.info.paged else 0
    if engine.info.paged and each * len(texts) > capacity.num_blocks:
        raise ValueError(f"{len(texts)} requests of {total} tokens do not fit into {capacity.num_blocks} blocks")
    stopping = StoppingParameters(load.new_tokens, ignore_eos=True)
    waiting = deque(
        RunningSequence(index, text, stopping, blocks=list(range(1 + index * each, 1 + (index + 1) * each)))
        for index, text in enumerate(texts)
    )
    started = time.perf_counter()
    running: deque[Step] = deque()
    while waiting or engine.batch:
        running.append(_next_step(engine, waiting, load.prefill))
        if len(running) > 1:
            running.popleft().collect()
    for step in running:
        step.collect()
    return time.perf_counter() - started


def peer_seconds(model: PreTrainedModel, texts: list[list[int]], new_tokens: int) -> float:
    """As `run_all`, by `generate_batch` of `transformers`; the second of two runs, which finds everything set up."""
    peer: Any = model
    config: Any = model.generation_config
    config.max_new_tokens = new_tokens
    seconds = 0.0
    for _ in range(2):
        synchronise(model.device)
        started = time.perf_counter()
        outputs = peer.generate_batch(inputs=texts, generation_config=config, persistent_manager=True)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.generated_tokens) for output in outputs.values())
        if tokens != len(texts) * new_tokens:
            raise ValueError(f"generate_batch gave {tokens} tokens, not {len(texts) * new_tokens}")
    peer.destroy_cached_continuous_batching_manager()
    return seconds


def mix_floor(shape: Shape, machine: Machine, load: Load) -> float:
    """Seconds: the products of all prompts, then a pass over weights and cache for each new token."""
    cost, rows = shape.cost, load.requests
    prompts_flops = rows * (load.context * cost.layer_flops + cost.head_flops)
    prompts_flops += rows * shape.attention_flops * load.context**2 / 2
    cached = rows * (load.context + load.new_tokens / 2) * shape.kv_bytes
    reading = (cost.weight_bytes + cached) / machine.bandwidth
    computing = rows * (cost.layer_flops + cost.head_flops) / machine.matrix_rate
    return prompts_flops / machine.matrix_rate + (load.new_tokens - 1) * max(reading, computing)


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    return [Random(index).choices(range(vocab_size), k=length) for index in range(count)]


def _next_step(engine: Engine, waiting: deque[RunningSequence], prefill: int) -> Step:
    joining: list[RunningSequence] = []
    while waiting and sum(len(each.input_ids) for each in [*joining, waiting[0]]) <= max(
        prefill, len(waiting[0].input_ids)
    ):
        joining.append(waiting.popleft())
    if not joining:
        return engine.step(_BATCH_ID)
    return engine.step(_BATCH_ID, joining, [(each.request_id, each.remaining) for each in joining])


def _first_token(engine: Engine, sequence: RunningSequence, prefill: int) -> float:
    started = time.perf_counter()
    joining = [sequence]
    while sequence.remaining:
        chunk = (sequence.request_id, min(prefill, sequence.remaining))
        step = engine.step(_BATCH_ID, joining, [chunk])
        joining = []
    step.collect()
    seconds = time.perf_counter() - started
    engine.keep(_BATCH_ID, [])
    return seconds
