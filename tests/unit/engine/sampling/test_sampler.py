"""The sampler as the engine uses it."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.sampling import Sampler, TokenMask, argmax

from .conftest import New
from .reference import processed

GREEDY, SILENT = SamplingParameters(), ReportParameters()
KINDS = {
    "greedy": GREEDY,
    "ignored warpers": SamplingParameters(temperature=0.5, top_k=3, top_p=0.5, typical_p=0.5, min_p=0.2),
    "repetition": SamplingParameters(repetition_penalty=1.7),
    "frequency": SamplingParameters(frequency_penalty=-1.5),
    "presence": SamplingParameters(presence_penalty=1.9),
    "count": SamplingParameters(count_penalty=1.1),
    "negative count": SamplingParameters(count_penalty=-0.7, presence_penalty=0.2, do_sample=True, seed=1),
    "bias": SamplingParameters(logit_bias={3: 2.5, 40: -100.0}),
    "sampling": SamplingParameters(do_sample=True, seed=2**64 - 1),
    "temperature": SamplingParameters(do_sample=True, temperature=0.6, seed=2),
    "top_k": SamplingParameters(do_sample=True, top_k=7, seed=3),
    "large top_k": SamplingParameters(do_sample=True, top_k=10**6, seed=3),
    "top_p": SamplingParameters(do_sample=True, top_p=0.8, seed=4),
    "typical_p": SamplingParameters(do_sample=True, typical_p=0.6, seed=5),
    "min_p": SamplingParameters(do_sample=True, min_p=0.1, seed=6),
    "everything": SamplingParameters(True, 1.4, 30, 0.9, 0.9, 0.01, 1.2, 0.5, 0.4, seed=7, logit_bias={5: 1.0}),
    "late": SamplingParameters(do_sample=True, seed=9, min_tokens=4, late_tokens=(1, 2, 3)),
    "watermark": SamplingParameters(do_sample=True, watermark=True, repetition_penalty=0.8, seed=8),
}


class Request:
    """A request and a model of its own: logits that are a function of its text."""

    def __init__(self, parameters: SamplingParameters, vocab: int, report: ReportParameters = SILENT) -> None:
        self.parameters = parameters
        self.report = report
        self.vocab = vocab
        self.prompt = [1, 2, 3, 2, vocab - 1]
        self.generated: list[int] = []

    def logits(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(self.prompt + self.generated)) % 2**32)
        return (torch.randn(self.vocab, generator=generator) * 2).to(dtype)

    def join(self, sampler: Sampler, row: int) -> None:
        sampler.add(row, self.parameters, self.report, self.prompt, self.generated)


def step(sampler: Sampler, requests: list[Request], rows: list[int] | None = None) -> None:
    rows = list(range(len(requests))) if rows is None else rows
    sampled = sampler.sample(torch.stack([request.logits() for request in requests]), rows)
    sampler.accept(sampled.token_ids, rows)
    for request, token in zip(requests, sampled.start_copy().wait().ids, strict=True):
        request.generated.append(token)


def alone(new: New, parameters: SamplingParameters, vocab: int, tokens: int) -> list[int]:
    request, sampler = Request(parameters, vocab), new(1, vocab)
    request.join(sampler, 0)
    for _ in range(tokens):
        step(sampler, [request])
    return request.generated


@pytest.mark.parametrize("vocab", [50, 70000])  # a batch in one piece, and in several
def test_text_does_not_depend_on_the_batch(new: New, vocab: int) -> None:
    tokens = 12 if vocab == 50 else 3
    requests = [Request(parameters, vocab) for parameters in KINDS.values()]
    sampler = new(len(requests), vocab)
    for row, request in enumerate(requests):
        request.join(sampler, row)
    for _ in range(tokens):
        step(sampler, requests)
    for name, request in zip(KINDS, requests, strict=True):
        assert request.generated == alone(new, request.parameters, vocab, tokens), name


@pytest.mark.parametrize("name", KINDS)
def test_text_survives_preemption_and_compaction(new: New, name: str) -> None:
    """A batch in which requests come, go, are preempted and moved, checked against the request alone."""
    chance = random.Random(name)
    sampler, waiting, running = new(4, 50), [], []
    watched = Request(KINDS[name], 50)
    waiting.append(watched)
    while len(watched.generated) < 15:
        if waiting and len(running) < 4:
            request = waiting.pop(chance.randrange(len(waiting)))
            request.join(sampler, len(running))
            running.append(request)
        if chance.random() < 0.3:
            waiting.append(Request(replace(chance.choice(list(KINDS.values())), seed=chance.randrange(2**64)), 50))
        if running:
            some = sorted(chance.sample(range(len(running)), chance.randint(1, len(running))))
            step(sampler, [running[row] for row in some], some)
        if running and chance.random() < 0.3:
            leaving = chance.randrange(len(running))
            request = running[leaving]
            if request is watched or chance.random() < 0.5:
                waiting.append(request)
            sampler.clear(leaving)
            last = running.pop()
            if leaving < len(running):
                sampler.move(len(running), leaving)
                running[leaving] = last
    assert watched.generated[:15] == alone(new, watched.parameters, 50, 15)


def test_seeds_matter_to_their_last_bit(new: New) -> None:
    seeds = (0, 1, 2**63, 2**63 + 1, 2**64 - 1)
    texts = {tuple(alone(new, SamplingParameters(do_sample=True, seed=seed), 50, 10)) for seed in seeds}
    assert len(texts) == len(seeds)


@pytest.mark.parametrize("prompt", [1, 1000])
def test_the_count_penalty_does_not_depend_on_the_prompt(new: New, prompt: int) -> None:
    sampler = new(1, 50)
    sampler.add(0, SamplingParameters(count_penalty=2.0), SILENT, [3] * prompt, [7, 7, 7])
    logits = torch.zeros(1, 50)
    logits[0, 7], logits[0, 3] = 6.5, 0.25
    assert sampler.sample(logits.clone(), [0]).token_ids.tolist() == [7]
    sampler.accept(torch.tensor([7]), [0])
    assert sampler.sample(logits.clone(), [0]).token_ids.tolist() == [3]


PARAMETERS = st.builds(
    SamplingParameters,
    do_sample=st.booleans(),
    temperature=st.sampled_from([1.0, 0.3, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.37, 0.93]),
    typical_p=st.sampled_from([1.0, 0.41, 0.87]),
    min_p=st.sampled_from([0.0, 0.013]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 1.1]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    count_penalty=st.sampled_from([0.0, 0.8, -1.3]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.sampled_from([{}, {0: 3.0, 7: -2.0}]),
)


# Always the same examples: among all there are some whose sums end so near to top_p that transformers, adding
# float32, decides otherwise. Logits without ties, since transformers' top_p keeps any of them.
@settings(deadline=None, max_examples=2 * settings().max_examples, derandomize=True)
@given(st.lists(PARAMETERS, min_size=1, max_size=6), st.sampled_from([11, 400]), st.integers(0, 2**32))
def test_probabilities_are_those_of_transformers(
    new: New, batch: list[SamplingParameters], vocab: int, seed: int
) -> None:
    """After two tokens, so that penalties have something to count."""
    report = ReportParameters(logprobs=True, top_n_tokens=vocab)
    requests = [Request(parameters, vocab, report) for parameters in batch]
    sampler, rows = new(len(batch), vocab), list(range(len(batch)))
    for row, request in enumerate(requests):
        request.prompt.append(seed % vocab)
        request.join(sampler, row)
    for _ in range(2):
        step(sampler, requests)
    logits = torch.stack([request.logits(torch.float32) for request in requests])
    before = logits.clone()
    tokens = sampler.sample(logits, rows).start_copy().wait()
    assert torch.equal(logits, before)
    for row, request in enumerate(requests):
        scores = processed(logits[row], request.parameters, request.prompt, request.generated)
        expected = scores.log_softmax(-1)
        assert tokens.logprobs[row] == pytest.approx(expected[tokens.ids[row]].item(), abs=2e-5)
        reported = torch.full((vocab,), -torch.inf)
        for token, logprob in tokens.top_tokens[row]:
            reported[token] = logprob
        torch.testing.assert_close(reported, expected, atol=2e-5, rtol=0)
        if not request.parameters.do_sample:
            assert scores[tokens.ids[row]] == scores.max()


def test_top_tokens_and_logprobs_of_some_rows(new: New) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 1.0, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 9.0]])
    sampler = new(4, 4)
    reports = [ReportParameters(False, 1), SILENT, ReportParameters(True, 1), ReportParameters(True, 2)]
    for row, report in enumerate(reports):
        sampler.add(row, GREEDY, report, [0], [])
    tokens = sampler.sample(logits, range(4)).start_copy().wait()
    assert tokens.ids == [1, 0, 3, 3]
    logprobs = logits.log_softmax(-1)
    assert tokens.logprobs == pytest.approx({2: logprobs[2, 3].item(), 3: logprobs[3, 3].item()}, abs=1e-6)
    assert [token for token, _ in tokens.top_tokens[0]] == [1, 3]  # ties are reported
    assert [token for token, _ in tokens.top_tokens[3]] == [3, 0, 1, 2]
    assert [token for token, _ in tokens.top_tokens[2]] == [3]
    assert set(tokens.top_tokens) == {0, 2, 3}


def test_grammar_masks_apply_before_ranking(new: New) -> None:
    vocab, allowed = 70, [{1, 33, 64}, {2}, set(range(32))]
    bits = torch.tensor(
        [[sum(1 << bit for bit in range(32) if 32 * word + bit in row) for word in range(3)] for row in allowed]
    )
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    sampler = new(5, vocab)
    kinds = [GREEDY, SamplingParameters(do_sample=True, top_k=2), GREEDY, SamplingParameters(do_sample=True), GREEDY]
    for row, kind in enumerate(kinds):
        sampler.add(row, kind, ReportParameters(logprobs=row == 1), [0], [])
    logits = torch.randn(5, vocab)
    before = logits.clone()
    tokens = sampler.sample(logits, range(5), TokenMask(bits, [4, 1, 3])).start_copy().wait()
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    logits = before
    assert tokens.ids[4] == max(allowed[0], key=lambda token: logits[4, token])
    assert tokens.ids[1] == 2
    assert tokens.logprobs[1] == 0.0
    assert tokens.ids[3] in allowed[2]
    assert tokens.ids[0] == logits[0].argmax()
    assert tokens.ids[2] == logits[2].argmax()


def test_masks_may_come_and_go_from_step_to_step(new: New) -> None:
    sampler = new(2, 32)
    for row in range(2):
        sampler.add(row, GREEDY, SILENT, [0], [])
    logits = torch.arange(32.0).expand(2, -1)
    only_five = torch.tensor([[1 << 5]], dtype=torch.int32)
    for positions, expected in (([0], [5, 31]), ([1], [31, 5])):
        assert sampler.sample(logits.clone(), [0, 1], TokenMask(only_five, positions)).token_ids.tolist() == expected
    assert sampler.sample(logits, [0, 1]).token_ids.tolist() == [31, 31]


def test_a_greedy_request_inherits_nothing_of_its_row(new: New) -> None:
    sampler, logits = new(2, 8), torch.zeros(2, 8)
    for row in range(2):
        sampler.add(row, SamplingParameters(logit_bias={3 + row: 5.0}), SILENT, [0], [])
    assert sampler.sample(logits, [0, 1]).token_ids.tolist() == [3, 4]
    sampler.add(0, GREEDY, SILENT, [0], [])
    assert sampler.sample(logits, [0, 1]).token_ids.tolist() == [0, 4]
    sampler.add(0, SamplingParameters(logit_bias={6: 5.0}), SILENT, [0], [])
    assert sampler.sample(logits, [0, 1]).token_ids.tolist() == [6, 4]
    sampler.clear(0)
    sampler.clear(1)
    assert sampler.sample(logits, [0, 1]).token_ids.tolist() == [0, 0]


def test_tokens_that_a_short_mask_does_not_cover_are_forbidden(new: New) -> None:
    sampler = new(1, 40)
    sampler.add(0, GREEDY, SILENT, [0], [])
    logits = torch.arange(40.0).unsqueeze(0)
    everything = torch.full((1, 1), -1, dtype=torch.int32)
    assert sampler.sample(logits, [0], TokenMask(everything, [0])).token_ids.tolist() == [31]


def test_accepted_tokens_count_and_not_the_sampled(new: New) -> None:
    sampler = new(1, 10)
    sampler.add(0, SamplingParameters(presence_penalty=2.0), SILENT, [4], [])
    logits = torch.zeros(1, 10)
    logits[0, 4], logits[0, 6] = 1.5, 1.0
    sampler.accept(torch.tensor([6]), [0])
    assert sampler.sample(logits, [0]).token_ids.tolist() == [4]  # of the prompt: not penalised
    sampler.accept(torch.tensor([4]), [0])
    logits[0, 9] = 0.1
    assert sampler.sample(logits, [0]).token_ids.tolist() == [9]


def test_a_temperature_next_to_zero_is_greedy(new: New) -> None:
    for temperature in (1e-6, 1e-30, 1e-60):
        sampler = new(1, 100)
        sampler.add(0, SamplingParameters(do_sample=True, temperature=temperature), SILENT, [1], [])
        logits = torch.randn(1, 100) * 100
        assert sampler.sample(logits, [0]).token_ids == logits.argmax()


def test_bias_beyond_the_vocabulary_is_refused(new: New) -> None:
    sampler = new(1, 10)
    with pytest.raises(ValueError, match="token 10"):
        sampler.add(0, SamplingParameters(logit_bias={10: 1.0}), SILENT, [1], [])


def test_prompt_tokens_beyond_the_vocabulary_are_ignored(new: New) -> None:
    sampler = new(1, 10)
    sampler.add(0, SamplingParameters(repetition_penalty=2.0), SILENT, [1, 31999], [])
    logits = torch.tensor([[1.0, 1.5] + [0.0] * 8])
    assert sampler.sample(logits, [0]).token_ids.tolist() == [0]


def test_argmax_is_the_first_of_equals() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens in (3, 1000, 50257):
            scores = torch.randn(8, tokens, generator=torch.Generator().manual_seed(0)).round().to(dtype)
            assert torch.equal(argmax(scores), scores.argmax(-1))
            first = [row.index(max(row)) for row in scores.tolist()]
            assert argmax(scores).tolist() == first


@pytest.mark.parametrize("do_sample", [False, True])
def test_late_tokens_come_after_others(new: New, do_sample: bool) -> None:
    vocab, least = 4, 5
    late = SamplingParameters(
        do_sample=do_sample, seed=3, min_tokens=least, late_tokens=(0, 1, 2), logit_bias={3: -50.0}
    )
    both = [Request(late, vocab), Request(replace(late, min_tokens=0), vocab)]
    sampler = new(2, vocab)
    for row, request in enumerate(both):
        request.join(sampler, row)
    for _ in range(least + 1):
        step(sampler, both)
    assert both[0].generated[:least] == [3] * least
    assert 3 not in (both[0].generated[least], *both[1].generated)
    resumed = Request(late, vocab)
    resumed.generated = both[0].generated[:2]
    sampler = new(1, vocab)
    resumed.join(sampler, 0)
    for _ in range(least - 1):
        step(sampler, [resumed])
    assert resumed.generated == both[0].generated
