"""Sixteen requests that come and go, through the engine's own interface, and what `transformers` makes of them."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.tiny_models import VOCAB_SIZE
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import Driver

LENGTHS = (1, 70, 5, 33, 64, 2, 17, 48, 9, 26, 57, 3, 40, 12, 65, 21)
NEW = 12
MAX_TOTAL_TOKENS = 128
# The number of chunks in which prompts of these lengths are computed, where that can be done; the others in one.
PARTS = {70: 3, 64: 2, 48: 3, 33: 2, 12: 2}


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def load_engine(folder: Path, dtype: torch.dtype = torch.float32, **settings) -> Engine:
    return Engine(EngineConfig(folder, dtype=dtype, **settings))


def expected_tokens(folder: Path, texts: list[list[int]]) -> list[list[int]]:
    """Returns what `generate()` adds to each prompt, one after the other."""
    model = load_reference(folder)
    return [generated(model, text) for text in texts]


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        factory = AutoModelForImageTextToText
    # what transformers 5.17 takes by default for a model with soft caps leaves them out
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = factory.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model


def generated(model: PreTrainedModel, text: list[int]) -> list[int]:
    """Returns what `generate()` adds to a prompt."""
    ids = torch.tensor([text])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return output[0, -NEW:].tolist()


class Requests:
    """Prompts that become requests, join and leave an engine's batch; their blocks lie scattered over the cache.

    engine, outputs: the engine, and the tokens of each request so far.
    """

    def __init__(
        self,
        engine: Engine,
        texts: list[list[int]],
        max_total_tokens: int = MAX_TOTAL_TOKENS,
        adapters: Sequence[str] | None = None,
        **settings: int,
    ) -> None:
        """adapters: the id of each request's adapter; empty: none. settings: of the warm-up, if it shall be shorter."""
        sizes = {"max_batch_size": len(LENGTHS), "max_prefill_tokens": 256, "max_total_tokens": max_total_tokens}
        capacity = engine.warm_up(**(sizes | settings))
        self.engine = engine
        self._texts = texts
        self._adapters = adapters or [""] * len(texts)
        self._before: list[list[int]] = [[] for _ in texts]
        blocks = list(range(1, capacity.num_blocks + 1))
        random.Random(2).shuffle(blocks)
        self._driver = Driver(engine, blocks=blocks)

    @property
    def outputs(self) -> list[list[int]]:
        outputs = self._driver.outputs
        return [
            before + outputs[index].tokens if index in outputs else before for index, before in enumerate(self._before)
        ]

    def join(self, index: int) -> None:
        """The request, with what it has generated so far, joins at the next step."""
        text, generated = self._texts[index], self.outputs[index]
        self._before[index] = generated
        known = len(text) + len(generated)
        parts = PARTS.get(known, 1) if self.engine.info.paged else 1
        chunks = [known // parts] * (parts - 1) + [known - known // parts * (parts - 1)]
        stopping = StoppingParameters(NEW, ignore_eos=True)
        sequence = RunningSequence(index, text, stopping, generated_ids=generated, adapter_id=self._adapters[index])
        self._driver.add(sequence, chunks)

    def leave(self, *indices: int) -> None:
        self._driver.leave(*indices)

    def step(self, *, decode: bool = True) -> None:
        self._driver.step(decode=decode)

    def finish(self) -> list[list[int]]:
        self._driver.run()
        return self.outputs


def generate_alone(engine: Engine, texts: list[list[int]], max_total_tokens: int = MAX_TOTAL_TOKENS) -> list[list[int]]:
    """Runs one request after the other."""
    requests = Requests(engine, texts, max_total_tokens)
    for index in range(len(texts)):
        requests.join(index)
        requests.finish()
    return requests.outputs


def generate_together(
    engine: Engine, texts: list[list[int]], max_total_tokens: int = MAX_TOTAL_TOKENS, **settings: int
) -> list[list[int]]:
    """Has two requests join in each step; each leaves when it is done. settings: of `Requests`."""
    requests = Requests(engine, texts, max_total_tokens, None, **settings)
    for index in range(len(texts)):
        requests.join(index)
        if index % 2:
            requests.step()
    return requests.finish()
