"""Sequences of different lengths as the rows of one padded batch."""

import torch
from transformers import DynamicCache

from tgi_server.engine.runners.padded.batch import PaddedBatch


def batch(*lengths: int) -> PaddedBatch:
    """Rows whose keys are their own length at the row's tokens, and 0 in the padding."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    keys = (mask * torch.tensor(lengths)[:, None])[:, None, :, None].float()
    cache = DynamicCache()
    cache.update(keys, keys, 0)
    return PaddedBatch(cache, list(lengths), mask)


def rows(padded: PaddedBatch) -> list[list[float]]:
    keys = padded.cache.layers[0].keys
    assert keys.shape[2] == padded.mask.shape[1] == max(padded.lengths)
    assert torch.equal(keys[:, 0, :, 0] > 0, padded.mask == 1)
    return keys[:, 0, :, 0].tolist()


def test_batches_are_joined_at_the_length_of_the_longest_row() -> None:
    padded = batch(2, 1)
    padded.append(batch(3))
    assert rows(padded) == [[0, 2, 2], [0, 0, 1], [3, 3, 3]]
    padded.append(batch(1))
    assert rows(padded) == [[0, 2, 2], [0, 0, 1], [3, 3, 3], [0, 0, 1]]
    assert padded.positions.tolist() == [2, 1, 3, 1]


def test_padding_goes_when_the_longest_row_does() -> None:
    padded = batch(2, 4, 1)
    padded.select([2, 0])
    assert rows(padded) == [[0, 1], [2, 2]]
    padded.grow()
    assert padded.mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert padded.positions.tolist() == [2, 3]
