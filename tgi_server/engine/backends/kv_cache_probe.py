"""Checks at load how much a KV cache in 8 bits changes logits. If too much, keys or both stay in the model's dtype.

Some models have keys with a large bias in a few channels (Qwen 2): its rounding error in FP8 exceeds all other numbers.
So the likelihoods of a text's tokens are computed with the cache in 8 bits and in the model's dtype and compared: first
with keys and values in 8 bits, then with the values alone.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import AttentionBackend
from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.backends.base import PagedModel
from tgi_server.engine.backends.own_pass import probe_tokens
from tgi_server.engine.backends.probe import blocks_of, text_logits
from tgi_server.engine.parallel import ShardGroup, fault_of_any
from tgi_server.grammar.tokenizer import read_definition

logger = logging.getLogger(__name__)

# The mean divergence, in nats, up to which a format is used: perplexity grows by about as much, so by 1 %.
MAX_LOSS = 0.01
# Tokens of the text, and of those that are compared.
_TOKENS, _COMPARED = 128, 64
_TEXT = """\
The ferry leaves the old harbour at seven in the morning and needs two hours to the island; in winter it only runs on
Mondays, Thursdays and Saturdays. Tickets cost 14.50 euros for adults, children below six travel free of charge.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("the mean of no values is not defined")
    return sum(values) / len(values)

{"name": "mean", "arguments": {"values": [1, 2.5, 40]}, "result": 14.5}

Question: Which of the three days is best for a visit? Answer: Saturday, because the museum is closed on weekdays and
the market on the square, where farmers sell cheese, bread and honey, opens at nine.
"""


def choose_kv_format(
    model: PagedModel,
    requested: KVFormat,
    attention: Callable[[KVFormat], AttentionBackend],
    folder: Path,
    positions: int | None,
    group: ShardGroup | None,
) -> None:
    """Gives a model the attention with the smallest KV format, up to the requested one, that hardly changes its logits.

    attention: makes the attention of a format. folder: the model's folder, with its tokenizer. positions: maximum
    length of a text; None: unlimited. group: the shards, which all choose the same.
    """
    tokens = _tokens(model, folder, positions)
    own = KVFormat(model.attention.dtype)
    expected = _logits(model, own, attention, tokens)
    for kv_format in _candidates(requested, own):
        fault = fault_of_any(
            proofs.failure_of(
                f"a cache in {kv_format}", partial(_fault, model, kv_format, attention, tokens, expected)
            ),
            group,
        )
        if fault is None:
            return
        logger.warning("--kv-cache-dtype: %s; it is not used", fault)
    model.attention = attention(own)
    logger.warning("--kv-cache-dtype: the KV cache stays in %s", own)


def _candidates(requested: KVFormat, own: KVFormat) -> Iterator[KVFormat]:
    yield requested
    yield replace(requested, key_dtype=own.dtype)


def _fault(
    model: PagedModel,
    kv_format: KVFormat,
    attention: Callable[[KVFormat], AttentionBackend],
    tokens: Tensor,
    expected: Tensor,
) -> str | None:
    """Returns the reason why a format must not be used; None: it may."""
    loss = divergence(expected, _logits(model, kv_format, attention, tokens))
    if loss <= MAX_LOSS:
        logger.info("KV cache in %s: divergence of %.4f", kv_format, loss)
        return None
    return f"a cache in {kv_format} makes the model worse by {math.expm1(min(loss, 10)):.1%} (at most {MAX_LOSS:.0%})"


def _logits(
    model: PagedModel, kv_format: KVFormat, attention: Callable[[KVFormat], AttentionBackend], tokens: Tensor
) -> Tensor:
    model.attention = attention(kv_format)
    model.allocate(blocks_of(len(tokens), model.attention.block_size) + 1)
    wanted = torch.arange(len(tokens), device=tokens.device)[-_COMPARED:]
    return text_logits(model, tokens, wanted).clone()


def _tokens(model: PagedModel, folder: Path, positions: int | None) -> Tensor:
    """Returns the tokens of the text, or for a model without a tokenizer some of its vocabulary: [tokens] int64."""
    source: Any = model.source
    known = probe_tokens(source, min(_TOKENS, positions or _TOKENS))
    file = folder / "tokenizer.json"
    if not file.is_file():
        return known
    ids = torch.tensor(Tokenizer.from_str(read_definition(folder)).encode(_TEXT).ids[: len(known)], device=known.device)
    return ids if len(ids) and int(ids.max()) < source.config.get_text_config(decoder=True).vocab_size else known


def divergence(expected: Tensor, actual: Tensor) -> float:
    """Returns the mean Kullback-Leibler divergence of logits, [rows, vocab_size], from the expected ones, in nats."""
    before, after = expected.float().log_softmax(-1), actual.float().log_softmax(-1)
    return float((before.exp() * (before - after)).masked_fill(before == -math.inf, 0).sum(-1).mean())
