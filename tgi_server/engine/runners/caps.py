"""The sequences of a batch and the prompt tokens of a step where the operator has not chosen them."""

from dataclasses import dataclass
from math import inf

# On CPUs, on the padded path, and what a GPU has at least; the first two are TGI's.
DEFAULT_SEQUENCES, DEFAULT_PREFILL_TOKENS = 128, 4096
# What a GPU has at most. A step with more prompt tokens is no more efficient, and all other requests wait for it.
MOST_SEQUENCES, MOST_PREFILL_TOKENS = 512, 16_384
_LEAST_PREFILL_TOKENS = 2048
# Sequences are a multiple of this, as the batch sizes of CUDA graphs are.
_UNIT = 32
# Tokens of a sequence for which there should be room, on average.
_EXPECTED_TOKENS = 1024
# Seconds that the arithmetic of all rows may add to a step, and seconds of the largest step with prompts alone.
_ROWS_SECONDS, _PROMPTS_SECONDS = 0.01, 0.25
# The prompt tokens whose time is measured.
MEASURED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Caps:
    """The maximum number of sequences in a batch, and of prompt tokens in a step."""

    sequences: int = DEFAULT_SEQUENCES
    prefill_tokens: int = DEFAULT_PREFILL_TOKENS


def caps_of_gpu(free_bytes: int, token_bytes: int, token_seconds: float) -> Caps:
    """Returns the largest useful batch and prefill of a GPU.

    free_bytes: memory for keys and values. token_bytes: bytes of a token's keys and values. token_seconds: the measured
    time for a token of a long prompt.
    """
    held = free_bytes // (max(token_bytes, 1) * _EXPECTED_TOKENS)
    rows, tokens = (_ROWS_SECONDS / token_seconds, _PROMPTS_SECONDS / token_seconds) if token_seconds else (inf, inf)
    sequences = int(min(held, rows, MOST_SEQUENCES)) // _UNIT * _UNIT
    prefill_tokens = 1 << (max(1, int(min(tokens, MOST_PREFILL_TOKENS))).bit_length() - 1)
    return Caps(max(sequences, DEFAULT_SEQUENCES), max(prefill_tokens, _LEAST_PREFILL_TOKENS))
