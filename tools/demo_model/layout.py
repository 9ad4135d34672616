"""How exchanges become the text that the model reads: Alpaca's form, the chat template's form, or none."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.demo_model.exchange import Exchange

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, TOOL)

_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)


@dataclass(frozen=True)
class Piece:
    """A stretch of a document; `learned` marks what the model is to write itself."""

    text: str
    learned: bool


Document = tuple[Piece, ...]


def alpaca_prompt(request: str, context: str = "") -> str:
    """The prompt of the Alpaca project's form (https://github.com/tatsu-lab/stanford_alpaca)."""
    if context:
        return f"{_ALPACA_WITH_INPUT}### Instruction:\n{request}\n\n### Input:\n{context}\n\n### Response:\n"
    return f"{_ALPACA}### Instruction:\n{request}\n\n### Response:\n"


def alpaca(exchange: Exchange, terse: bool = False) -> Document:
    """An exchange in Alpaca's form.

    As some callers do, `terse` leaves out the sentences before the instruction. The last line break is part of what
    the model learns to write, so that it also answers where a caller leaves it out.
    """
    prompt = alpaca_prompt(exchange.request, exchange.context)
    if terse:
        prompt = prompt[prompt.index("###") :]
    return (Piece(BOS + prompt.removesuffix("\n"), learned=False), Piece(f"\n{exchange.answer}{EOS}", learned=True))


def chat(exchanges: Sequence[Exchange], system: str = "") -> Document:
    """A conversation, as chat_template.jinja writes it."""
    pieces = [Piece(BOS + (SYSTEM + system if system else ""), learned=False)]
    for exchange in exchanges:
        request = f"{exchange.request}\n{exchange.context}" if exchange.context else exchange.request
        pieces.append(Piece(USER + request + ASSISTANT, learned=False))
        pieces.append(Piece(exchange.answer + EOS, learned=True))
    return tuple(pieces)


def bare(exchange: Exchange, separator: str) -> Document:
    """The request and its answer in no format; the separator belongs to what the model writes."""
    request = f"{exchange.request}\n{exchange.context}" if exchange.context else exchange.request
    return (Piece(BOS + request, learned=False), Piece(separator + exchange.answer + EOS, learned=True))


def prose(text: str) -> Document:
    """Text that the model may continue from any point."""
    return (Piece(BOS, learned=False), Piece(text + EOS, learned=True))
