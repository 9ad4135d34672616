import pytest
import torch

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.sampling import WatermarkSettings, detect
from tgi_server.engine.sampling.processors import TokenCounts, TokenMask, is_green

from .conftest import New

VOCAB = 2000


def generate(new: New, watermark: bool, settings: WatermarkSettings, tokens: int = 200) -> list[int]:
    """Text of a model that finds every token about as likely as the next."""
    sampler = new(1, VOCAB, settings)
    sampler.add(0, SamplingParameters(do_sample=True, seed=5, watermark=watermark), ReportParameters(), [17], [])
    generator = torch.Generator().manual_seed(1)
    text = [17]
    for _ in range(tokens):
        sampled = sampler.sample(torch.randn(1, VOCAB, generator=generator), [0])
        sampler.accept(sampled.token_ids, [0])
        text.extend(sampled.token_ids.tolist())
    return text


@pytest.mark.parametrize("settings", [WatermarkSettings(), WatermarkSettings(gamma=0.25, delta=4.0)])
def test_detector_tells_marked_text_from_other(new: New, settings: WatermarkSettings) -> None:
    marked, plain = detect(generate(new, True, settings), settings), detect(generate(new, False, settings), settings)
    assert marked.z > 6
    assert marked.p < 1e-8
    assert abs(plain.z) < 3
    assert marked.total == plain.total == 200


def test_another_key_detects_nothing(new: New) -> None:
    text = generate(new, True, WatermarkSettings(key=1))
    assert abs(detect(text, WatermarkSettings(key=2)).z) < 3


def test_score_is_that_of_the_paper() -> None:
    settings = WatermarkSettings(gamma=0.25)
    text = list(range(101))
    score = detect(text, settings)
    green = sum(bool(is_green(torch.tensor(a), torch.tensor(a + 1), settings)) for a in range(100))
    assert (score.green, score.total) == (green, 100)
    assert score.z == pytest.approx((green - 25) / (100 * 0.25 * 0.75) ** 0.5)


def test_repeated_pairs_are_no_new_evidence() -> None:
    settings = WatermarkSettings()
    assert detect([1, 2] * 100, settings).total == 2
    assert detect([1], settings).p == 1.0


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9])
def test_green_lists_have_their_share(gamma: float) -> None:
    previous = torch.arange(200).unsqueeze(1)
    green = is_green(previous, torch.arange(VOCAB), WatermarkSettings(gamma=gamma)).double()
    assert green.mean().item() == pytest.approx(gamma, abs=0.005)
    assert green.mean(0).std() < 0.05  # no token is green after most others
    assert green.mean(1).std() < 0.02  # no list is much longer than others


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_gamma_is_a_share(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        WatermarkSettings(gamma=gamma)


def test_greedy_rows_are_marked_too(new: New) -> None:
    settings = WatermarkSettings(delta=3.0)
    sampler = new(2, VOCAB, settings)
    sampler.add(0, SamplingParameters(watermark=True), ReportParameters(), [4, 9], [])
    sampler.add(1, SamplingParameters(), ReportParameters(), [4, 9], [])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    green = is_green(torch.tensor(9), torch.arange(VOCAB), settings)
    expected = [(logits[0] + 3.0 * green).argmax(), logits[1].argmax()]
    assert sampler.sample(logits, [0, 1]).token_ids.tolist() == expected


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [[0, 1, 2], [2, 0], [1]])
def test_a_mask_leaves_allowed_logits_and_other_rows_as_they_are(dtype, positions) -> None:
    # The mask ends before the vocabulary does.
    allowed = torch.rand(3, 96) < 0.5
    words = (allowed.view(3, 3, 32).to(torch.int64) << torch.arange(32)).sum(-1)
    bits = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    before = torch.randn(3, 100).to(dtype)
    logits = before.clone()
    TokenMask(bits[positions], positions).apply(logits)
    masked = torch.zeros(3, 1, dtype=torch.bool).index_fill(0, torch.tensor(positions), True)
    forbidden = masked & ~torch.cat([allowed, torch.zeros(3, 4, dtype=torch.bool)], 1)
    assert torch.equal(logits, before.masked_fill(forbidden, -torch.inf))
