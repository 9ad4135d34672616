from typing import Any

import pytest

from tgi_server.router.errors import InvalidRequest
from tgi_server.router.request import Limits
from tgi_server.router.schemas.generate import CountingParameters, GenerateParameters
from tgi_server.router.text.parameters import check_amounts, check_best_of, check_streaming, sampling_parameters

LIMITS = Limits(
    max_concurrent_requests=8,
    max_best_of=2,
    max_stop_sequences=2,
    max_top_n_tokens=5,
    max_input_tokens=20,
    max_total_tokens=30,
    max_batch_prefill_tokens=100,
    max_batch_total_tokens=1000,
    max_waiting_tokens=20,
    waiting_served_ratio=0.3,
    max_batch_size=8,
    max_client_batch_size=4,
)


VOCAB_SIZE = 100


def check(**fields: Any) -> None:
    parameters = GenerateParameters(**fields)
    sampling = sampling_parameters(parameters, VOCAB_SIZE)
    check_amounts(parameters, LIMITS)
    check_best_of(parameters, sampling, LIMITS)


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("temperature", [0.01, 5.0], [0.0, -1.0, 1e-60, 1e60]),
        ("repetition_penalty", [0.5, 2.0], [0.0, -0.1]),
        ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1]),
        ("presence_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1]),
        ("top_p", [0.01, 0.99], [0.0, 1.0, 1.1]),
        ("typical_p", [0.01, 0.99], [0.0, 1.0, -1.0]),
        ("min_p", [0.0, 0.5], [-0.1, 1.0]),
        ("top_k", [1, 10**6], [0, -5]),
        ("max_new_tokens", [1, 10**6], [0, -1]),
        ("top_n_tokens", [0, 5], [6]),
        ("truncate", [1, 20], [0, 21]),
        ("stop", [[], ["a", "b"], ["a" * 1000]], [["a", "b", "c"], [""], ["a" * 1001]]),
        ("logit_bias", [{"7": 100.0}, {}], [{"x": 1.0}, {"-1": 1.0}, {"7": 100.5}, {"100": 1.0}, {"9" * 5000: 1.0}]),
    ],
)
def test_the_bounds_of_each_parameter(name: str, allowed: list[Any], refused: list[Any]):
    for value in allowed:
        check(**{name: value})
    for value in refused:
        with pytest.raises(InvalidRequest, match=name):
            check(**{name: value})


def test_best_of_needs_sampling_and_no_seed():
    check(best_of=2, do_sample=True)
    check(best_of=1, seed=3)
    with pytest.raises(InvalidRequest, match="needs sampling"):
        check(best_of=2)
    with pytest.raises(InvalidRequest, match="seed"):
        check(best_of=2, do_sample=True, seed=3)
    for amount in (0, 3):
        with pytest.raises(InvalidRequest, match="1 to 2"):
            check(best_of=amount, do_sample=True)


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"decoder_input_details": True}])
def test_what_a_stream_cannot_have(fields: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="streaming"):
        check_streaming(GenerateParameters(**fields))


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_sampling_is_on_when_it_is_shaped(fields: dict[str, Any]):
    assert sampling_parameters(GenerateParameters(**fields), VOCAB_SIZE).do_sample


@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.5}, {"seed": 3}, {"min_p": 0.1}, {"stop": ["a"]}])
def test_otherwise_it_is_off(fields: dict[str, Any]):
    assert not sampling_parameters(GenerateParameters(**fields), VOCAB_SIZE).do_sample


def test_a_seed_is_drawn_when_there_is_none():
    assert sampling_parameters(GenerateParameters(seed=3), VOCAB_SIZE).seed == 3
    assert len({sampling_parameters(GenerateParameters(), VOCAB_SIZE).seed for _ in range(5)}) == 5


def test_openais_frequency_penalty_counts_tokens():
    of_tgi = sampling_parameters(GenerateParameters(frequency_penalty=0.5), VOCAB_SIZE)
    of_openai = sampling_parameters(CountingParameters(frequency_penalty=0.5), VOCAB_SIZE)
    assert (of_tgi.frequency_penalty, of_tgi.count_penalty) == (0.5, 0.0)
    assert (of_openai.frequency_penalty, of_openai.count_penalty) == (0.0, 0.5)
    with pytest.raises(InvalidRequest, match="`frequency_penalty` must be -2 to 2"):
        sampling_parameters(CountingParameters(frequency_penalty=2.5), VOCAB_SIZE)


def test_logit_bias_is_by_token_id():
    assert sampling_parameters(GenerateParameters(logit_bias={"7": -1.5}), VOCAB_SIZE).logit_bias == {7: -1.5}
