"""Sampling of the next token: logits processors, warpers, seeded draws, watermark and log-probabilities.

Start reading at `sampler.py`.
"""

from tgi_server.engine.sampling.choice import SamplerChoice
from tgi_server.engine.sampling.cpu_sampler import CpuSampler
from tgi_server.engine.sampling.logprobs import (
    PendingTokens,
    Sampled,
    ScoredReport,
    Tokens,
    prompt_logprobs,
    scored_logprobs,
)
from tgi_server.engine.sampling.metadata import is_greedy, most_logits, top_logits
from tgi_server.engine.sampling.processors import TokenMask, WatermarkScore, WatermarkSettings, detect
from tgi_server.engine.sampling.sampler import Sampler, argmax
from tgi_server.engine.sampling.torch_sampler import TorchSampler, row_kernel_fault

__all__ = [
    "CpuSampler",
    "PendingTokens",
    "Sampled",
    "Sampler",
    "SamplerChoice",
    "ScoredReport",
    "TokenMask",
    "Tokens",
    "TorchSampler",
    "WatermarkScore",
    "WatermarkSettings",
    "argmax",
    "detect",
    "is_greedy",
    "most_logits",
    "prompt_logprobs",
    "row_kernel_fault",
    "scored_logprobs",
    "top_logits",
]
