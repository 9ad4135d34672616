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


NAN, LOW = float("nan"), -torch.inf
LOGITS = torch.tensor(
    [
        [1, 5, 2, 0, 3, 4, 5],  # equals in two shards: the first
        [0, 1, 2, 3, 9, 4, 9],
        [-3, -2, -4, -5, -6, -7, -8],  # all below the zeros that fill up the last shard
        [LOW] * 7,
        [0, NAN, 2, 0, 3, NAN, 5],
        [1, 2, 3, 4, 5, 6, NAN],
    ]
)


def best_tokens(group: ShardGroup, dtype: torch.dtype, shards: int) -> tuple[Tensor, Tensor]:
    """Returns the argmax of a split vocabulary by two numbers of each shard, and that of all logits."""
    width = -(-VOCABULARY // shards)
    part = torch.cat([LOGITS, torch.zeros(len(LOGITS), width * shards - VOCABULARY)], 1)
    part = part[:, width * group.rank :][:, :width].to(dtype)
    head = VocabParallelHead(nn.Identity(), group, share_of(group.rank, shards, HEADS))
    head.vocab_size = VOCABULARY
    with head.apart():
        assert head(part) is part
    return head.argmax(part), head(part).max(-1).indices


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_best_token_is_found_without_all_logits(dtype: torch.dtype, shards: int, ranks_of: RanksOf) -> None:
    for found, wanted in ranks_of(shards).run(best_tokens, dtype, shards):
        assert found.tolist() == wanted.tolist()
        assert found.tolist()[:4] == [1, 4, 1, 0]
