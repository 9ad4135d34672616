"""Documents as rows of token ids, and which tokens the model is to write itself."""

from collections.abc import Iterator
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.corpus import Split, documents

_DOCUMENTS_AT_ONCE = 256


def encoded(tokenizer: Tokenizer, seed: int, split: Split, turns: int) -> Iterator[tuple[list[int], list[bool]]]:
    """The ids of each document and which of them are learned, without end."""
    stream = documents(seed, split, turns)
    while True:
        batch = list(islice(stream, _DOCUMENTS_AT_ONCE))
        pieces = [piece for document in batch for piece in document]
        encodings = iter(tokenizer.encode_batch([piece.text for piece in pieces], add_special_tokens=False))
        for document in batch:
            ids: list[int] = []
            learned: list[bool] = []
            for piece in document:
                part = next(encodings).ids
                ids += part
                learned += [piece.learned] * len(part)
            yield ids, learned


def batches(
    tokenizer: Tokenizer, seed: int, turns: int, rows: int, length: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of inputs, targets and the targets that count, each `[rows, length]`: documents laid end to end."""
    ids: list[int] = []
    learned: list[bool] = []
    size = rows * length
    for more_ids, more_learned in encoded(tokenizer, seed, Split.TRAINING, turns):
        ids += more_ids
        learned += more_learned
        while len(ids) > size:
            window = torch.tensor(ids[: size + 1])
            counts = torch.tensor(learned[1 : size + 1])
            yield window[:-1].view(rows, length), window[1:].view(rows, length), counts.view(rows, length)
            del ids[:size], learned[:size]
