"""Documents as rows of token ids, and how much each token counts in the loss."""

from collections.abc import Iterator
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.corpus import Split, documents

PROMPT_WEIGHT = 0.15
_DOCUMENTS_AT_ONCE = 256


def encoded(tokenizer: Tokenizer, seed: int, split: Split, turns: int) -> Iterator[tuple[list[int], list[float]]]:
    """The ids of each document and the weight of each id in the loss, without end."""
    stream = documents(seed, split, turns)
    while True:
        batch = list(islice(stream, _DOCUMENTS_AT_ONCE))
        pieces = [piece for document in batch for piece in document]
        encodings = iter(tokenizer.encode_batch([piece.text for piece in pieces], add_special_tokens=False))
        for document in batch:
            ids: list[int] = []
            weights: list[float] = []
            for piece in document:
                part = next(encodings).ids
                ids += part
                weights += [1.0 if piece.learned else PROMPT_WEIGHT] * len(part)
            yield ids, weights


def batches(
    tokenizer: Tokenizer, seed: int, turns: int, rows: int, length: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of inputs, targets and weights, each `[rows, length]`: documents laid end to end, in training order."""
    ids: list[int] = []
    weights: list[float] = []
    size = rows * length
    for more_ids, more_weights in encoded(tokenizer, seed, Split.TRAINING, turns):
        ids += more_ids
        weights += more_weights
        while len(ids) > size:
            window = torch.tensor(ids[: size + 1])
            weight = torch.tensor(weights[1 : size + 1])
            yield window[:-1].view(rows, length), window[1:].view(rows, length), weight.view(rows, length)
            del ids[:size], weights[:size]
