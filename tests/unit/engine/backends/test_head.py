"""The LM head with a pre-filter against the same head computed whole."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.tiny_models import make
from tests.unit.engine.own_memory import Peak, own_bytes
from tests.unit.engine.requests import expected_tokens, generate_alone, load_engine, load_reference, prompts
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.backends.head import PrefilteredHead
from tgi_server.engine.driver import Driver
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.memory import low_mmap_threshold
from tgi_server.engine.sampling.processors import TokenMask
from tgi_server.engine.step import Generation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def _outliers(rows: int, size: int) -> torch.Tensor:
    values = torch.randn(rows, size)
    values[:, ::37] *= 30
    return values


_INPUTS = {
    "random": torch.randn,
    "outliers": _outliers,
    "zeros": torch.zeros,
    "infinite": lambda *shape: torch.full(shape, torch.inf),
    "no numbers": lambda *shape: torch.full(shape, torch.nan),
    "huge": lambda *shape: torch.randn(shape) * 1e37,
    "tiny": lambda *shape: torch.randn(shape) * 1e-37,
}


@pytest.mark.parametrize("inputs", _INPUTS)
@pytest.mark.parametrize("weights", ["random", "alike", "outliers", "with no numbers"])
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])])
def test_a_prefiltered_head_finds_the_largest_output_as_if_it_had_computed_all(dtype, weights, inputs) -> None:
    weight = (_outliers if weights == "outliers" else torch.randn)(7001, 96)
    if weights == "alike":  # so close to each other that many outputs are equal once they are rounded
        weight = weight[:1] + torch.randn(7001, 96) * 1e-3
    if weights == "with no numbers":
        weight[5000, 3] = torch.nan
    head = PrefilteredHead(weight.to(dtype))
    most = torch.ops.oatmill.prefilter_rows(torch.ops.oatmill.linear_pack(torch.zeros(1, 96, dtype=torch.int8)))
    for rows in (0, 1, 2, 7, most, most + 1):
        x = _INPUTS[inputs](rows, 96).to(dtype)
        wanted, actual = head(x), head.top_logits(x)
        torch.testing.assert_close(torch.ops.oatmill.argmax(actual), torch.ops.oatmill.argmax(wanted))
        left_out = actual == -torch.inf
        torch.testing.assert_close(actual[~left_out], wanted[~left_out], rtol=0, atol=0, equal_nan=True)
        if (weights, inputs) == ("random", "random"):
            assert bool(left_out.any()) == (0 < rows <= most)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["random", "alike", "with no numbers"])
@pytest.mark.parametrize("dtype", [DTYPES[1], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[::2])])
def test_a_prefiltered_head_finds_some_of_the_largest_outputs(dtype, weights, tied) -> None:
    weight = torch.randn(7001, 96)
    if weights == "alike":
        weight = weight[:1] + torch.randn(7001, 96) * 1e-3
    if weights == "with no numbers":
        weight[5000, 3] = torch.nan
    weight = weight.to(dtype)
    head = PrefilteredHead(weight)
    for rows, count in ((1, 1), (1, 9), (3, 3), (5, 1), (1, 10), (4, 3)):
        x = torch.randn(rows, 96).to(dtype)
        mask = TokenMask(torch.randint(-(2**31), 2**31, (1, 219)).to(torch.int32), [rows - 1])
        for chosen in (None, mask):
            wanted, actual = head(x), head.top_logits(x, count, chosen, weight if tied else None)
            left_out = actual == -torch.inf
            torch.testing.assert_close(actual[~left_out], wanted[~left_out], rtol=0, atol=0, equal_nan=True)
            if weights != "alike":
                assert bool(left_out.any()) == (count == 1 or rows * count <= 9)  # of 146 tiles
            for row in range(rows):
                allowed = wanted[row].nan_to_num(-torch.inf)
                if chosen and row == rows - 1:
                    bits = chosen.bits[0].unsqueeze(1) >> torch.arange(32, dtype=torch.int32) & 1
                    allowed = allowed.where(bits.flatten()[:7001] > 0, -torch.inf)
                largest = allowed >= allowed.topk(count).values[-1]
                assert not bool((left_out[row] & largest).any())


@pytest.mark.parametrize("inputs", ["random", "outliers", "no numbers"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_head_whose_depth_suits_matrices_finds_the_largest_output(rows, inputs) -> None:
    head = PrefilteredHead(torch.randn(7001, 128).bfloat16())
    mask = TokenMask(torch.randint(-(2**31), 2**31, (2, 219)).to(torch.int32), [1, 3]) if rows > 1 else None
    x = _INPUTS[inputs](rows, 128).bfloat16()
    wanted, actual = head(x), head.top_logits(x, 1, mask)
    chosen = (mask.bits, mask.positions) if mask else (None, [])
    torch.testing.assert_close(*(torch.ops.oatmill.argmax(each, *chosen) for each in (actual, wanted)))
    if inputs == "random":
        assert bool((actual == -torch.inf).any())


@pytest.mark.parametrize("inputs", ["random", "outliers", "infinite", "no numbers"])
@pytest.mark.parametrize("words", [1, 150, 219])
def test_a_prefiltered_head_finds_the_largest_of_what_masks_allow(words, inputs) -> None:
    head = PrefilteredHead(torch.randn(7001, 96).bfloat16())
    everywhere, nowhere = torch.full((2, words), -1, dtype=torch.int32), torch.zeros(2, words, dtype=torch.int32)
    one = nowhere[:1].clone()
    one[0, words // 2] = 1 << 30
    rare = torch.randint(-(2**31), 2**31, (6, 2, words)).to(torch.int32).unbind()
    bits = torch.cat([one, rare[0] & rare[1] & rare[2] & rare[3] & rare[4] & rare[5], everywhere[:1], nowhere[:1]])
    for rows in (1, 5, 8, 9):
        positions = torch.randperm(max(rows, 5))[:5].tolist()
        chosen = [i for i, position in enumerate(positions) if position < rows]
        mask = TokenMask(bits[chosen], [positions[i] for i in chosen])
        x = _INPUTS[inputs](rows, 96).bfloat16()
        wanted, actual = head(x), head.top_logits(x, 1, mask)
        largest = [torch.ops.oatmill.argmax(each, mask.bits, mask.positions) for each in (actual, wanted)]
        torch.testing.assert_close(*largest)


def test_a_prompt_in_parts_with_nobody_beside_it_is_answered_as_whole(tmp_path) -> None:
    folder = make("llama", tmp_path, vocab_size=33_000)  # of which the head is large enough for a pre-filter
    assert PrefilteredHead.pays(load_reference(folder).get_output_embeddings().weight)
    texts = prompts((70, 12))
    assert generate_alone(load_engine(folder), texts) == expected_tokens(folder, texts)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_sampled_with_top_k_do_not_depend_on_the_prefilter(tied, tmp_path) -> None:
    folder = make("llama", tmp_path, vocab_size=33_000, tie_word_embeddings=tied)
    engine = load_engine(folder, torch.bfloat16)
    engine.warm_up(max_batch_size=4, max_prefill_tokens=64, max_total_tokens=64)
    report, stopping = ReportParameters(logprobs=True, top_n_tokens=3), StoppingParameters(8, ignore_eos=True)
    sampling = SamplingParameters(do_sample=True, temperature=1.5, top_k=20, top_p=0.9, seed=7)
    whole = SamplingParameters(do_sample=True)  # needs all logits, and so those beside it get all

    def generations(*others: SamplingParameters) -> list[Generation]:
        driver = Driver(engine)
        for number, other in enumerate(others, 1):
            driver.add(RunningSequence(number, [5, 6, 7], StoppingParameters(9, ignore_eos=True), other))
        return driver.run(RunningSequence(0, [3, 4, 5, 6], stopping, sampling, report))[0].generations

    alone = generations()
    assert len(alone) == 8
    assert alone == generations(whole) == generations(SamplingParameters()) == generations(SamplingParameters(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefiltered_head_leaves_the_weight_that_embeddings_share_with_it(dtype) -> None:
    weight = torch.randn(2_000, 64).to(dtype)
    before = weight.clone()
    PrefilteredHead(weight)
    assert torch.equal(weight, before)


def bytes_of_a_head(weight_rows: int, size: int) -> int:
    """Returns the most bytes that there were more than before while a head was made."""
    load_kernels()
    weight = torch.randn(weight_rows, size).bfloat16()
    with low_mmap_threshold():
        PrefilteredHead(weight[: weight_rows // 4])  # which brings along what any head does
        before, peak = own_bytes(), Peak()
        with peak.watching():
            PrefilteredHead(weight)
    return peak.bytes - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_head_takes_no_more_memory_while_it_is_made_than_afterwards() -> None:
    # In a process of its own, as a shard is: among what other tests have freed the C library places memory differently.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        peak = processes.submit(bytes_of_a_head, 32_000, 768).result()
    kept = 32_000 * 768 * (2 + 1)  # in bfloat16, and in 8 bits
    assert peak < 1.15 * kept
