"""Generating for a list of prompts at once, without a server.

    python -m tgi_server.engine.offline "How long do I boil potatoes?" "How do I sharpen a knife?"

In Python:

    engine = Engine(EngineConfig(Path("my-model")))
    outputs = generate(engine, [[1, 52, 17], [1, 9]], StoppingParameters(max_new_tokens=32))
"""

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from tgi_server import demo_model
from tgi_server.contract import Image, SamplingParameters, StoppingParameters
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.driver import Driver
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.sequence import RunningSequence


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stopping: StoppingParameters,
    sampling: SamplingParameters | None = None,
    *,
    max_batch_size: int = 32,
    max_prefill_tokens: int = 2048,
    images: Sequence[Sequence[Image]] | None = None,
) -> list[list[int]]:
    """Returns the generated token ids, in the order of the prompts; an end-of-sequence token comes last.

    images: the images of each prompt; None: no images.
    As many prompts run together as fit. Each has its blocks from the start, so none is ever preempted.
    Raises InvalidCall for a prompt that does not fit, NotEnoughMemory if no sequence fits.
    """
    capacity = engine.warm_up(max_batch_size, max_prefill_tokens)
    for index, prompt in enumerate(prompts):
        total = len(prompt) + stopping.max_new_tokens
        if total > capacity.max_total_tokens:
            raise InvalidCall(f"prompt {index} may grow to {total} tokens; at most {capacity.max_total_tokens} fit")
    driver = Driver(engine, max_prefill_tokens=max_prefill_tokens)
    sampling = sampling or SamplingParameters()
    sequences = [
        RunningSequence(index, list(prompt), stopping, sampling, images=list(images[index]) if images else [])
        for index, prompt in enumerate(prompts)
    ]
    return [output.tokens for output in driver.run(*sequences)]


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
