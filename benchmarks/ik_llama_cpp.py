"""ik_llama.cpp's library, from the prebuilt package `ik-llama-cpp-python`, as something to compare with.

    python -m benchmarks.ik_llama_cpp model.gguf
    python -m benchmarks.ik_llama_cpp model.gguf --batch 1 8 --context 512

Runs in an environment of its own, `pip install ik-llama-cpp-python` (README.md). Measures what `benchmarks.engine`
measures of the same file, without sampling: the prompts of a batch, then decoding steps of one token a sequence.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import IkContext, IkModel

# Tokens of one call, of prompts.
CHUNK = 512


def decode(context: IkContext, rows: list[tuple[int, int, int]]) -> None:
    """Computes rows of (token, position, sequence), and the logits of the last row of each sequence."""
    batch = api.llama_batch_init(len(rows), 0, 1)
    last = {sequence: index for index, (_, _, sequence) in enumerate(rows)}
    batch.n_tokens = len(rows)
    for index, (token, position, sequence) in enumerate(rows):
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        batch.logits[index] = last[sequence] == index
    status = context.decode(batch)
    api.llama_batch_free(batch)
    if status:
        raise RuntimeError(f"llama_decode returned {status}")


def measure(model: IkModel, sequences: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the prompt tokens per second and the milliseconds of a decoding step of a batch."""
    length = arguments.context
    size = sequences * (length + arguments.steps)
    context = IkContext(
        model,
        n_ctx=-(-size // 256) * 256,
        n_threads=arguments.threads,
        flash_attn=arguments.flash_attention,
        n_seq_max=sequences,
    )
    rows = [(1000 + 7 * place + row, place, row) for row in range(sequences) for place in range(length)]
    decode(context, rows[:8])
    api.llama_kv_cache_clear(context.ctx)
    start = time.perf_counter()
    for first in range(0, len(rows), CHUNK):
        decode(context, rows[first : first + CHUNK])
    prompt = time.perf_counter() - start
    steps = []
    for step in range(arguments.steps):
        start = time.perf_counter()
        decode(context, [(2000 + 5 * step + row, length + step, row) for row in range(sequences)])
        steps.append(time.perf_counter() - start)
    context.close()
    return {"prompt_tokens_per_s": len(rows) / prompt, "step_ms": 1e3 * median(steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences at once")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="decoding steps to measure (default: %(default)s)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="default: all cores, %(default)s")
    parser.add_argument("--flash-attention", action="store_true", help="needs AVX-VNNI; aborts on long prompts without")
    arguments = parser.parse_args()
    model = IkModel(str(arguments.model))
    results = {sequences: measure(model, sequences, arguments) for sequences in arguments.batch}
    print("sequences  prompt tokens/s  ms a step")
    for sequences, result in results.items():
        print(f"{sequences:9}  {result['prompt_tokens_per_s']:15.1f}  {result['step_ms']:9.1f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
