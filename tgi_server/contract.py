"""The terms that router and engine share: sampling and stopping parameters, grammar, finish reason, block copy.

They are defined here once. `wire.py` turns them into the messages of `generate.proto` and back.
"""

from dataclasses import dataclass, field
from enum import Enum

# Tokens that may be drafted for a sequence in one step: the router grants blocks for so many ahead, and more are hardly
# ever all right.
MOST_DRAFTED = 32


class FinishReason(Enum):
    """The reason why a request ended. Named as in TGI's HTTP interface; the values are what clients see."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class GrammarKind(Enum):
    """The notation of a grammar."""

    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    LARK = "lark"


# Of a grammar's text, and of the text that its spans come from. The largest compile in a few seconds.
_MOST_GRAMMAR_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Grammar:
    """The form that generated text must have.

    value: the grammar, in the notation that `type` names.
    text: the source of spans (`x-span` in a JSON schema) where the schema names none itself.
    frame: a Lark grammar around a JSON schema, in which `%schema POINTER` stands for JSON that fits the schema there.
    lenient: places in a JSON schema (JSON pointers that begin with #) below which constraints that cannot be enforced
    are left to the model; elsewhere they are refused.
    """

    type: GrammarKind
    value: str
    text: str = ""
    frame: str = ""
    lenient: tuple[str, ...] = ()

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
class SamplingParameters:
    """The rules by which the next token is chosen. The defaults are greedy decoding.

    Each parameter is named as in TGI's HTTP interface, and its default switches its rule off.

    count_penalty: OpenAI's `frequency_penalty`, which is taken off once for each time that a token has been generated.
    TGI's, which `frequency_penalty` is here, goes by the token's share of prompt and generated text.
    min_tokens: so many tokens are generated before any of `late_tokens` may be, which end the text.
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
    count_penalty: float = 0.0
    seed: int = 0
    watermark: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    late_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoppingParameters:
    """The end of generation.

    max_new_tokens: tokens to generate, those generated before a preemption included.
    ignore_eos: an end-of-sequence token is a token like any other.
    """

    max_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ReportParameters:
    """The extras of a response beside its tokens. Each item costs a softmax over the vocabulary.

    logprobs: of the generated tokens. top_n_tokens: most likely tokens to report at each position.
    prefill_logprobs: of the prompt's tokens. prefill_top_n: most likely tokens to report in the place of each of them.
    """

    logprobs: bool = False
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
    prefill_top_n: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `tokens` entries of KV block `source` are copied to block `target` before anything is computed."""

    source: int
    target: int
    tokens: int
