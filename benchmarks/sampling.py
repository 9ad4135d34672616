"""Measures what choosing the next tokens costs, by kind of request.

python -m benchmarks.sampling --rows 32 --vocab 50272
"""

import argparse
import statistics
import time

import torch

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.sampling import Sampler

_PLAIN, _LOGPROBS = ReportParameters(), ReportParameters(logprobs=True)
KINDS = {
    "greedy": (SamplingParameters(), _PLAIN),
    "greedy, logprobs": (SamplingParameters(), _LOGPROBS),
    "greedy, repetition_penalty": (SamplingParameters(repetition_penalty=1.2), _PLAIN),
    "greedy, watermark": (SamplingParameters(watermark=True), _PLAIN),
    "temperature": (SamplingParameters(do_sample=True, temperature=0.8), _PLAIN),
    "temperature, logprobs": (SamplingParameters(do_sample=True, temperature=0.8), _LOGPROBS),
    "top_k=50": (SamplingParameters(do_sample=True, top_k=50), _PLAIN),
    "top_p=0.9": (SamplingParameters(do_sample=True, top_p=0.9), _PLAIN),
    "top_k=50, top_p=0.9": (SamplingParameters(do_sample=True, top_k=50, top_p=0.9), _PLAIN),
    "typical_p=0.9": (SamplingParameters(do_sample=True, typical_p=0.9), _PLAIN),
    "min_p=0.05": (SamplingParameters(do_sample=True, min_p=0.05), _PLAIN),
}


def measure(
    kind: tuple[SamplingParameters, ReportParameters], logits: torch.Tensor, sampling_rows: int, steps: int
) -> float:
    """Median milliseconds of one step in which the first `sampling_rows` rows are of `kind`, the others greedy."""
    count, vocab_size = logits.shape
    sampler = Sampler(count, vocab_size, logits.device)
    for row in range(count):
        parameters, report = kind if row < sampling_rows else KINDS["greedy"]
        sampler.add(row, parameters, report, range(100), [])
    times = []
    for _ in range(steps + 1):
        _wait(logits.device)
        started = time.perf_counter()
        sampled = sampler.sample(logits, range(count))
        sampler.accept(sampled.token_ids, range(count))
        _wait(logits.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="sequences in the batch (default: %(default)s)")
    parser.add_argument("--sampling-rows", type=int, help="how many of them are not greedy (default: all)")
    parser.add_argument("--vocab", type=int, default=50272, help="tokens of the vocabulary (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps to take the median of (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(arguments.rows, arguments.vocab, generator=generator).mul_(3)
    logits = logits.to(arguments.device, getattr(torch, arguments.dtype))
    sampling_rows = arguments.rows if arguments.sampling_rows is None else arguments.sampling_rows
    shape = f"[{arguments.rows}, {arguments.vocab}] {arguments.dtype} on {arguments.device}"
    print(f"logits {shape}, {sampling_rows} rows not greedy, {torch.get_num_threads()} threads")
    for name, kind in KINDS.items():
        print(f"{name:28} {measure(kind, logits, sampling_rows, arguments.steps):9.2f} ms", flush=True)


if __name__ == "__main__":
    torch.inference_mode()(main)()
