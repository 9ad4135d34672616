"""The terms that router and engine share: generation options, grammar, finish reason, block copy.

They are defined here once. `wire.py` converts them to the messages of `generate.proto` and back. A new option of a
request is a field here, a field of the same name there, and the code that applies it.
"""

from dataclasses import dataclass, field
from enum import Enum
from mmap import mmap
from typing import Any, Literal, Protocol

# Tokens that may be drafted for a sequence in one step: the router grants blocks for this many ahead, and
# more are hardly ever all right.
MOST_DRAFTED = 32

# What a model does that reads texts and writes none: embeddings, or scores of texts and pairs.
Task = Literal["embed", "rank"]


class FinishReason(Enum):
    """The reason why a request ended. Named as in TGI's HTTP interface; the values are what clients see."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    DEADLINE = "deadline"


class GrammarKind(Enum):
    """The notation of a grammar."""

    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    LARK = "lark"


# Maximum size of a grammar's text, and of the text that its spans refer to. The largest compile in a few seconds.
_MOST_GRAMMAR_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Grammar:
    """The form that generated text must have.

    value: the grammar, in the notation that `type` names.
    text: the source of spans (`x-span` in a JSON schema) where the schema names none itself.
    frame: a Lark grammar around a JSON schema, in which `%schema POINTER` stands for JSON that fits the schema there.
    lenient: places in a JSON schema (JSON pointers that begin with #) below which constraints that cannot be enforced
    are left to the model; elsewhere they are refused.
    reading: the reading of the JSON schema that it was made from, for a response's headers; empty: there is no schema.
    place: the field of the request that has it, for errors.
    """

    type: GrammarKind
    value: str
    text: str = ""
    frame: str = ""
    lenient: tuple[str, ...] = ()
    reading: str = field(default="", compare=False)
    place: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        """The characters of its texts."""
        return len(self.value) + len(self.text) + len(self.frame)

    def too_long(self) -> str:
        """Returns why it is too long to be compiled; nothing if it is not."""
        size = self.text_bytes()
        return f"it has {size} bytes; at most {_MOST_GRAMMAR_BYTES} are compiled" if size > _MOST_GRAMMAR_BYTES else ""

    def text_bytes(self) -> int:
        """Returns the bytes of its texts."""
        return sum(len(text.encode(errors="surrogatepass")) for text in (self.value, self.text, self.frame))


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """The number of tokens that a model may think before it answers.

    begin, end: the texts around a thought. closing: tokens that are generated once the budget is used up. open: a
    thought has begun in the prompt. repeats: another thought may follow at once, within the same budget.
    """

    tokens: int
    begin: str
    end: str
    closing: tuple[int, ...]
    open: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a number, or of a text's number of characters. None: no bound on that side."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def fault(self, value: float) -> str | None:
        """Returns the bound that `value` breaks, as in "it must be at most 1"; None if it breaks none."""
        if self.least is not None and value < self.least:
            return f"at least {self.least}"
        if self.above is not None and value <= self.above:
            return f"greater than {self.above}"
        if self.most is not None and value > self.most:
            return f"at most {self.most}"
        if self.below is not None and value >= self.below:
            return f"less than {self.below}"
        return None


@dataclass(frozen=True, slots=True)
class Option:
    """The metadata of a generation option beside its name, type and default. example: a value, for documentation."""

    description: str
    bounds: Bounds
    example: object = None


# The key of an option in the metadata of a dataclass field.
OPTION = "option"

_INT32 = 2**31 - 1
_UINT32 = 2**32 - 1


def _option(
    default: Any,
    description: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    example: object = None,
) -> Any:
    """Declares an option that a request may set: a field of a dataclass, which every interface then accepts by the same
    name. `router/options.py` says where an interface has another name, other bounds, or no such option.
    """
    return field(default=default, metadata=_row(description, Bounds(least, above, most, below), example))


def _row(description: str, bounds: Bounds, example: object = None) -> dict[str, Option]:
    """Returns the metadata of a field that is an option."""
    return {OPTION: Option(description, bounds, example)}


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The rules by which the next token is chosen. Each default switches its rule off, which leaves greedy decoding.

    frequency_penalty, count_penalty: TGI's penalty depends on a token's share of prompt and generated text, OpenAI's on
    how often it was generated. late_tokens: tokens that end the text, and may come only after `min_tokens` others.
    """

    do_sample: bool = _option(False, "Sample, rather than take the most likely token.")
    temperature: float = _option(1.0, "Divides the logits.", above=0, example=0.7)
    top_k: int = _option(0, "Sample only from this number of most likely tokens.", least=1, most=_INT32, example=40)
    top_p: float = _option(
        1.0, "Sample from the most likely tokens of this total probability.", above=0, below=1, example=0.95
    )
    typical_p: float = _option(1.0, "Typical decoding mass (arXiv:2202.00666).", above=0, below=1, example=0.95)
    min_p: float = _option(
        0.0, "Drop tokens less likely than this share of the most likely one's probability.", least=0, below=1
    )
    repetition_penalty: float = _option(1.0, "Divides the logits of tokens seen before.", above=0, example=1.1)
    frequency_penalty: float = _option(
        0.0, "Penalty of a token, times its share of prompt and generated text.", least=-2, most=2
    )
    presence_penalty: float = _option(0.0, "Penalty of a token once it was generated.", least=-2, most=2)
    count_penalty: float = _option(0.0, "Penalty of a token for each time that it was generated.", least=-2, most=2)
    seed: int = _option(0, "Seed of sampling; unset: random.", least=0, most=2**64 - 1, example=42)
    watermark: bool = _option(False, "Watermark the text (arXiv:2301.10226).")
    logit_bias: dict[int, float] = field(
        default_factory=dict,
        metadata=_row("Added to the logits, by token id; as a list, one for each token.", Bounds(least=-100, most=100)),
    )
    min_tokens: int = _option(0, "Least number of tokens to generate.", least=0, most=_UINT32)
    late_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoppingParameters:
    """The rules that end generation. max_new_tokens: tokens generated before a preemption count, too."""

    max_new_tokens: int = _option(0, "Tokens to generate; unset: as many as fit.", least=1, most=_INT32, example=40)
    ignore_eos: bool = _option(False, "Generate as many tokens as may be, whatever the model says.")


@dataclass(frozen=True, slots=True)
class ReportParameters:
    """The extras of a response beside its tokens. Each item costs a softmax over the vocabulary.

    logprobs: True to report those of the generated tokens. prefill_top_n: number of most likely tokens to report at
    each prompt token. scored_token_ids: tokens whose log-probabilities are reported instead of the top tokens, in this
    order, from the logits before any rule changes them.
    """

    logprobs: bool = False
    top_n_tokens: int = _option(0, "Number of most likely tokens to report at each position.", least=0, most=_UINT32)
    prefill_logprobs: bool = _option(False, "Report the prompt's tokens and their log-probabilities.")
    prefill_top_n: int = 0
    scored_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """All generation options of a request, from any interface.

    include_stop: a stop sequence is part of the text that it ends. truncate: 0 for the whole prompt.
    """

    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters = field(default_factory=StoppingParameters)
    report: ReportParameters = field(default_factory=ReportParameters)
    n: int = _option(1, "Answers to generate for each prompt.", least=1, most=_UINT32)
    best_of: int = _option(
        0, "Number of sequences to generate; the most likely one is the answer.", least=1, most=_UINT32, example=2
    )
    stop: tuple[str, ...] = _option((), "Texts that end the generation.", example=["\n\n"])
    stop_token_ids: tuple[int, ...] = _option((), "Tokens that end the text.")
    allowed_token_ids: tuple[int, ...] = _option((), "Generate only these tokens; not with a grammar.")
    include_stop: bool = _option(False, "Show the stop sequence.")
    skip_special_tokens: bool = _option(True, "Leave special tokens out of the text.")
    truncate: int = _option(0, "Number of tokens to use at the prompt's end; the rest is cut.", least=1, most=_UINT32)
    cache_salt: str | None = _option(
        None, "Reuse what was computed of a prompt only for prompts with the same salt.", least=1, most=1024
    )
    adapter_id: str | None = _option(None, "Adapter to use.")
    prompt_cache_key: str | None = _option(
        None,
        "Keep the prompt in the prefix cache for 5 minutes, instead of the last one with this key.",
        least=1,
        most=1024,
    )
    timeout_ms: int = _option(
        0, "Time limit in milliseconds, from the request's arrival.", least=1, most=_INT32, example=2000
    )
    thinking_token_budget: int | None = _option(
        None,
        "Maximum number of reasoning tokens before the answer; then reasoning is closed. 0: no reasoning.",
        least=-1,
        most=_INT32,
        example=256,
    )
    on_timeout: str | None = _option(
        None,
        "At the deadline the request fails (`fail`; unset: this), its text ends as it is (`partial`), or its grammar "
        "ends it whole just before (`complete`).",
        example="complete",
    )
    priority: int = _option(
        0, "Requests with a lower number are served first, and preempt others.", least=-(2**31), most=_INT32, example=1
    )
    grammar: Grammar | None = None
    thought_budget: ThoughtBudget | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `tokens` entries of KV block `source` are copied to block `target` before anything is computed."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StateSave:
    """The state after the first `length` tokens of a request, which a step copies into a snapshot."""

    request_id: int
    length: int
    snapshot: int


class MappedBytes(Protocol):
    """Bytes in memory that another process has made."""

    def __len__(self) -> int: ...

    def map(self) -> mmap:
        """Returns the bytes without a copy. Writes to them are private.

        Raises OSError or ValueError if they are gone.
        """


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array in row-major order, as the image processor of a model returns it.

    name: the argument of the model's `forward()` that takes it. dtype: float32, int64, int32 or bool.
    data: its elements, little-endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | MappedBytes


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a prompt. Its features replace the embeddings of its tokens.

    digest: SHA-256 of its pixels and of the processor's settings.
    start, length: its tokens in the prompt, from the first to the last, including tokens between its rows or parts.
    tensors: outputs of the image processor for this image alone; `pixel_values` may be missing if all of its tokens are
    cached.
    """

    digest: bytes
    start: int
    length: int
    tensors: tuple[Tensor, ...]
