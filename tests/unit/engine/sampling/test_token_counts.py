import torch

from tgi_server.engine.sampling.token_counts import TokenCounts


def test_counts_take_memory_only_when_rows_take_slots() -> None:
    pool = TokenCounts(100, torch.device("cpu"))
    assert pool.counts.numel() == 0
    slots = [pool.take([1, 1, 7, i]) for i in range(5)]
    assert len(set(slots)) == 5
    assert len(pool.counts) == 8
    for i, slot in enumerate(slots):
        assert torch.equal(pool.counts[slot], torch.bincount(torch.tensor([1, 1, 7, i]), minlength=100).int())


def test_released_slots_start_empty_again() -> None:
    pool = TokenCounts(10, torch.device("cpu"))
    slot = pool.take([1, 2])
    pool.record(torch.tensor([slot]), torch.tensor([2]), torch.tensor([1]))
    pool.record(torch.tensor([slot]), torch.tensor([3]), torch.tensor([0]))
    assert pool.counts[slot].tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    pool.release(slot)
    assert pool.take([]) == slot
    assert not pool.counts[slot].any()
