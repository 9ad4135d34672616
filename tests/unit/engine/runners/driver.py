"""Sixteen requests that come and go, through the engine's own interface, and what `transformers` makes of them."""

import random
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.tiny_models import VOCAB_SIZE
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.engine import Step

LENGTHS = (1, 70, 5, 33, 64, 2, 17, 48, 9, 26, 57, 3, 40, 12, 65, 21)
NEW = 12
MAX_TOTAL_TOKENS = 128
PARTS = {70: 3, 64: 2, 48: 3, 33: 2, 12: 2}
"""In how many chunks prompts of these lengths are computed, where that can be done; the others in one."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def load_engine(folder: Path, dtype: torch.dtype = torch.float32, **settings) -> Engine:
    return Engine(EngineConfig(folder, dtype=dtype, **settings))


def expected_tokens(folder: Path, texts: list[list[int]]) -> list[list[int]]:
    """What `generate()` adds to each prompt, one after the other."""
    config = AutoConfig.from_pretrained(folder)
    factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    # what transformers 5.17 takes by default for a model with soft caps leaves them out
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = factory.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    outputs = []
    for text in texts:
        ids = torch.tensor([text])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        outputs.append(output[0, -NEW:].tolist())
    return outputs


class Driver:
    """Warms an engine up, gives sequences blocks, scattered over the cache, and collects what they generate."""

    def __init__(self, engine: Engine, texts: list[list[int]], max_total_tokens: int = MAX_TOTAL_TOKENS) -> None:
        capacity = engine.warm_up(
            max_batch_size=len(LENGTHS), max_prefill_tokens=256, max_total_tokens=max_total_tokens
        )
        self.engine = engine
        self.texts = texts
        self.outputs: list[list[int]] = [[] for _ in texts]
        self._chunks: dict[int, list[int]] = {}  # tokens of the chunks that a request still has before it
        self._joining: list[RunningSequence] = []
        self._blocks = list(range(1, capacity.num_blocks + 1))
        random.Random(2).shuffle(self._blocks)

    def join(self, index: int) -> None:
        """The request, with what it has generated so far, joins at the next step."""
        known = len(self.texts[index]) + len(self.outputs[index])
        blocks = []
        if self.engine.info.paged:
            size = self.engine.info.block_size
            blocks = [self._blocks.pop() for _ in range(-(-(len(self.texts[index]) + NEW) // size))]
        stopping = StoppingParameters(NEW, ignore_eos=True)
        generated = list(self.outputs[index])
        self._joining.append(
            RunningSequence(index, self.texts[index], stopping, generated_ids=generated, blocks=blocks)
        )
        parts = PARTS.get(known, 1) if self.engine.info.paged else 1
        self._chunks[index] = [known // parts] * (parts - 1) + [known - known // parts * (parts - 1)]

    def leave(self, *indices: int) -> None:
        self.engine.keep(1, [index for index in range(len(self.texts)) if index not in indices])
        for index in indices:
            self._chunks.pop(index, None)

    def step(self, decode: bool = True) -> None:
        """One chunk of each prompt that has some left, and one token for every running request."""
        joining, self._joining = self._joining, []
        chunks = [(index, parts.pop(0)) for index, parts in self._chunks.items()]
        self._chunks = {index: parts for index, parts in self._chunks.items() if parts}
        self._take(self.engine.step(1, joining, chunks, decode=decode) if chunks else self.engine.step(1))

    def finish(self) -> list[list[int]]:
        while self._joining or self.engine.batch:
            self.step()
        return self.outputs

    def _take(self, step: Step) -> None:
        for generation in step.collect().generations:
            self.outputs[generation.request_id].append(generation.token_id)


def generate_alone(engine: Engine, texts: list[list[int]], max_total_tokens: int = MAX_TOTAL_TOKENS) -> list[list[int]]:
    """One request after the other."""
    driver = Driver(engine, texts, max_total_tokens)
    for index in range(len(texts)):
        driver.join(index)
        driver.finish()
    return driver.outputs


def generate_together(
    engine: Engine, texts: list[list[int]], max_total_tokens: int = MAX_TOTAL_TOKENS
) -> list[list[int]]:
    """Two requests join in each step, and each leaves when it is done."""
    driver = Driver(engine, texts, max_total_tokens)
    for index in range(len(texts)):
        driver.join(index)
        if index % 2:
            driver.step()
    return driver.finish()
