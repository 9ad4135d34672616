"""What a request asks of the engine."""

from dataclasses import dataclass, field
from enum import Enum


class GrammarType(Enum):
    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text has to match, in the notation that `type` names.

    text: what spans (`x-span` in a JSON schema) are taken from where the schema names no source.
    """

    type: GrammarType
    value: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token is chosen. The defaults are greedy decoding.

    Each is named as in TGI's HTTP interface; a value that switches its rule off is the default.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    watermark: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoppingParameters:
    """When generation ends.

    max_new_tokens: tokens to generate, those generated before a preemption included.
    ignore_eos: whether an end-of-sequence token is a token like any other.
    """

    max_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ReportParameters:
    """What is reported beside the tokens themselves. Each item costs a softmax over the vocabulary."""

    logprobs: bool = False
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
