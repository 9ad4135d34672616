"""Choosing the next token: processors, warpers, seeded draws, watermark and what is reported of them.

Start reading at `sampler.py`.
"""

from tgi_server.engine.sampling.logprobs import PendingTokens, Sampled, Tokens, prompt_logprobs
from tgi_server.engine.sampling.metadata import is_greedy, is_plain
from tgi_server.engine.sampling.processors import TokenMask, WatermarkScore, WatermarkSettings, detect
from tgi_server.engine.sampling.sampler import Sampler, best, row_kernel_fault

__all__ = [
    "PendingTokens",
    "Sampled",
    "Sampler",
    "TokenMask",
    "Tokens",
    "WatermarkScore",
    "WatermarkSettings",
    "best",
    "detect",
    "is_greedy",
    "is_plain",
    "prompt_logprobs",
    "row_kernel_fault",
]
