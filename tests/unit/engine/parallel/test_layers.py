"""Layers of two shards against the whole layer."""

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.conftest import RanksOf
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.parallel.layers import RowParallel, VocabParallelEmbedding, VocabParallelHead
from tgi_server.engine.parallel.shares import Heads, share_of

HEADS = Heads(4, 2)
VOCABULARY = 7
WHOLE = torch.arange(VOCABULARY * 6, dtype=torch.float32).view(VOCABULARY, 6)
TOKENS = torch.tensor([[0, 3, 4], [6, 5, 1]])


def part_of(rank: int) -> Tensor:
    """Returns a shard's half of the vocabulary; the last shard's is filled up with zeros."""
    return torch.cat([WHOLE, torch.zeros(1, 6)])[4 * rank : 4 * rank + 4]


def embed(group: ShardGroup) -> Tensor:
    inner = nn.Embedding.from_pretrained(part_of(group.rank))
    return VocabParallelEmbedding(inner, group, share_of(group.rank, 2, HEADS))(TOKENS)


def project(group: ShardGroup) -> Tensor:
    inner = nn.Linear(6, 4, bias=False)
    inner.weight = nn.Parameter(part_of(group.rank), requires_grad=False)
    head = VocabParallelHead(inner, group, share_of(group.rank, 2, HEADS))
    head.vocab_size = VOCABULARY
    return head(WHOLE[:3])


def add_up(group: ShardGroup) -> Tensor:
    inner = nn.Linear(3, VOCABULARY, bias=False)
    columns = slice(3 * group.rank, 3 * group.rank + 3)
    inner.weight = nn.Parameter(WHOLE[:, columns].contiguous(), requires_grad=False)
    return RowParallel(inner, group, share_of(group.rank, 2, HEADS))(WHOLE[:3, columns])


@pytest.mark.parametrize(
    ("layer", "expected"), [(embed, WHOLE[TOKENS]), (project, WHOLE[:3] @ WHOLE.T), (add_up, WHOLE[:3] @ WHOLE.T)]
)
def test_every_shard_gets_what_the_whole_layer_computes(layer, expected: Tensor, ranks_of: RanksOf) -> None:
    for result in ranks_of(2).run(layer):
        torch.testing.assert_close(result, expected)
