"""The options of a request, which every interface makes of its own fields and refuses in its own words."""

from dataclasses import fields
from typing import Any

import pytest

from tgi_server.contract import GenerationOptions
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.limits import OPENAI, Limits
from tgi_server.router.option_reader import OptionReader, check_company
from tgi_server.router.options import Dialect, rows
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import GenerateParameters
from tgi_server.router.schemas.messages import MessagesRequest
from tgi_server.router.schemas.ollama import OllamaOptions
from tgi_server.router.schemas.responses import ResponsesRequest
from tgi_server.router.schemas.validation import validate

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


OTHER_LIMITS = [each.name for each in fields(Limits) if each.name not in (*OPENAI, "given")]
VOCAB_SIZE = 100
BODIES = {
    Dialect.TGI: (GenerateParameters, {}),
    Dialect.CHAT: (ChatRequest, {"messages": [{"role": "user", "content": "hello"}]}),
    Dialect.COMPLETIONS: (CompletionRequest, {"prompt": "hello"}),
    Dialect.RESPONSES: (ResponsesRequest, {"input": "hello"}),
    Dialect.MESSAGES: (MessagesRequest, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}),
    Dialect.OLLAMA: (OllamaOptions, {}),
}
OPENAI = [dialect for dialect in Dialect if dialect is not Dialect.TGI]


def read(dialect: Dialect = Dialect.TGI, defaults: dict[str, float] | None = None, /, **sent: Any) -> GenerationOptions:
    """Returns the options of a request's body. Raises InvalidRequest."""
    model, body = BODIES[dialect]
    return OptionReader(LIMITS, VOCAB_SIZE, (1,), defaults).read(validate(model, body | sent), dialect)


def last_name(refusal: InvalidRequest) -> str:
    """Returns the name of the refused option, without the object of the request that has it."""
    return (refusal.param or "").rpartition(".")[2]


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
        ("stop_token_ids", [[], [99]], [[100]]),
        ("allowed_token_ids", [[], [99]], [[100]]),
        ("logit_bias", [{"7": 100.0}, {}], [{"x": 1.0}, {"-1": 1.0}, {"7": 100.5}, {"100": 1.0}, {"9" * 5000: 1.0}]),
    ],
)
def test_the_bounds_of_each_option(name: str, allowed: list[Any], refused: list[Any]):
    for value in allowed:
        read(**{name: value})
    for value in refused:
        with pytest.raises(InvalidRequest, match=name) as refusal:
            read(**{name: value})
        assert name in (refusal.value.param or "").split(".")


@pytest.mark.parametrize("dialect", Dialect)
def test_every_bound_of_the_table_is_enforced_and_documented(dialect: Dialect):
    model, _ = BODIES[dialect]
    properties = model.model_json_schema()["properties"]
    numbers = [row for row in rows(dialect) if row.type in (int, float)]
    assert numbers
    for row in numbers:
        for name in row.names:
            (shown,) = (
                each for each in properties[name].get("anyOf", [properties[name]]) if each.get("type") != "null"
            )
            lowest, above = shown.get("minimum"), shown.get("exclusiveMinimum")
            highest, below = shown.get("maximum"), shown.get("exclusiveMaximum")
            assert (lowest, above, highest, below) == (
                *(row.bounds.least, row.bounds.above),
                *(row.bounds.most, row.bounds.below),
            )
            beyond = [None if lowest is None else lowest - 1, above, None if highest is None else highest + 1, below]
            for value in filter(lambda each: each is not None, beyond):
                with pytest.raises(InvalidRequest, match=f"`{name}` is .*; it must be ") as refusal:
                    read(dialect, **{name: row.type(value)})
                assert refusal.value.param == name


def test_best_of_needs_sampling_and_no_seed():
    read(best_of=2, do_sample=True)
    read(best_of=1, seed=3)
    with pytest.raises(InvalidRequest, match=r"`parameters\.best_of` needs one of `parameters\.do_sample`"):
        read(best_of=2)
    with pytest.raises(InvalidRequest, match="seed"):
        read(best_of=2, do_sample=True, seed=3)
    for amount in (0, 3):
        with pytest.raises(InvalidRequest, match=f"best_of` is {amount}"):
            read(best_of=amount, do_sample=True)


@pytest.mark.parametrize("sent", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True}])
def test_what_a_stream_cannot_have(sent: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="streaming"):
        OptionReader(LIMITS, VOCAB_SIZE).read(validate(GenerateParameters, sent), Dialect.TGI, streams=True)
    read(**sent)


def test_a_stream_of_no_tokens_is_refused():
    body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    request = validate(MessagesRequest, body)
    assert OptionReader(LIMITS, VOCAB_SIZE).read(request, Dialect.MESSAGES).stopping.max_new_tokens == 0
    with pytest.raises(InvalidRequest, match="`max_tokens` cannot be 0 when streaming") as error:
        OptionReader(LIMITS, VOCAB_SIZE).read(request, Dialect.MESSAGES, streams=True)
    assert error.value.param == "max_tokens"


@pytest.mark.parametrize("sent", [{"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_sampling_is_on_when_it_is_shaped(sent: dict[str, Any]):
    assert read(**sent).sampling.do_sample


@pytest.mark.parametrize("sent", [{}, {"repetition_penalty": 1.5}, {"seed": 3}, {"min_p": 0.1}, {"stop": ["a"]}])
def test_otherwise_it_is_off(sent: dict[str, Any]):
    assert not read(**sent).sampling.do_sample


@pytest.mark.parametrize("dialect", OPENAI)
@pytest.mark.parametrize(
    ("sent", "sampled"),
    [({}, True), ({"temperature": 0.5}, True), ({"temperature": 0}, False), ({"temperature": 0, "top_p": 0.5}, False)],
)
def test_elsewhere_it_is_on_unless_the_temperature_is_0(dialect: Dialect, sent: dict[str, Any], sampled: bool):
    sampling = read(dialect, top_k=5, **sent).sampling
    assert sampling.do_sample == sampled
    assert sampled or (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


def test_ollamas_defaults_are_for_what_neither_a_request_nor_the_model_sets():
    sampling = read(Dialect.OLLAMA, {"temperature": 0.6}, top_k=7).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.do_sample) == (0.6, 7, 0.9, True)
    sampling = read(Dialect.OLLAMA).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.8, 40, 0.9, 1.0)
    assert not read(Dialect.OLLAMA, temperature=0).sampling.do_sample


@pytest.mark.parametrize(("sent", "tokens"), [(-2, 0), (-1, 0), (0, 0), (3, 3)])
def test_a_length_that_is_no_bound_is_unset(sent: int, tokens: int):
    assert read(Dialect.OLLAMA, num_predict=sent).stopping.max_new_tokens == tokens
    if tokens:
        with pytest.raises(InvalidRequest, match=r"it must be at most `options\.num_predict`, which is 3"):
            read(Dialect.OLLAMA, num_predict=sent, min_tokens=4)
    else:
        assert read(Dialect.OLLAMA, num_predict=sent, min_tokens=4).sampling.min_tokens == 4


def test_values_that_switch_a_rule_off_are_its_default():
    off = read(Dialect.CHAT, top_p=1, top_k=-1, seed=1).sampling
    assert (off.top_p, off.top_k) == (1.0, 0)
    options = read(Dialect.CHAT, top_p=0.5, top_k=4, min_p=0.1, seed=3, stop="x", logit_bias={"5": 1.0})
    sampling = options.sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 4, 0.1, 3)
    assert (options.stop, sampling.logit_bias) == (("x",), {5: 1.0})


def test_the_models_own_defaults_are_for_what_is_not_sent():
    defaults = {"temperature": 0.6, "top_k": 20}
    sampling = read(Dialect.CHAT, defaults, temperature=0.5).sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 20)
    assert read(Dialect.TGI, defaults).sampling.top_k == 0


def test_a_seed_is_drawn_when_there_is_none():
    assert read(seed=3).sampling.seed == 3
    assert len({read().sampling.seed for _ in range(5)}) == 5
    assert read(Dialect.CHAT, seed=-5).sampling.seed == 2**64 - 5
    assert len({read(Dialect.CHAT, seed=-1).sampling.seed for _ in range(5)}) == 5


def test_openais_frequency_penalty_counts_tokens():
    of_tgi, of_openai = (read(dialect, frequency_penalty=0.5).sampling for dialect in (Dialect.TGI, Dialect.CHAT))
    assert (of_tgi.frequency_penalty, of_tgi.count_penalty) == (0.5, 0.0)
    assert (of_openai.frequency_penalty, of_openai.count_penalty) == (0.0, 0.5)


@pytest.mark.parametrize("dialect", Dialect)
def test_tokens_that_end_a_text_come_late_with_min_tokens(dialect: Dialect):
    options = read(dialect, min_tokens=2, stop_token_ids=[7])
    assert (options.sampling.min_tokens, options.sampling.late_tokens) == (2, (1, 7))
    assert read(dialect, stop_token_ids=[7]).sampling.late_tokens == ()


@pytest.mark.parametrize("dialect", Dialect)
def test_null_means_that_an_option_is_not_set(dialect: Dialect):
    _, required = BODIES[dialect]
    nulls = {name: None for row in rows(dialect) for name in row.names if name not in required}
    assert read(dialect, **nulls | {"seed": 3}) == read(dialect, seed=3)


def test_the_number_of_tokens_has_two_names_where_openai_has_two():
    names = ("max_tokens", "max_completion_tokens")
    for dialect in (Dialect.CHAT, Dialect.COMPLETIONS):
        assert [read(dialect, **{name: 3}).stopping.max_new_tokens for name in names] == [3, 3]
        assert read(dialect).stopping.max_new_tokens == 0
        assert read(dialect, max_tokens=5, max_completion_tokens=5).stopping.max_new_tokens == 5
        with pytest.raises(InvalidRequest, match="`max_tokens` is 5 and `max_completion_tokens` is 3; give one"):
            read(dialect, max_tokens=5, max_completion_tokens=3)


@pytest.mark.parametrize("dialect", Dialect)
def test_limits_that_the_operator_gives_bound_all_interfaces(dialect: Dialect):
    names = {"n": 2, "best_of": 2, "stop": ["a"], "top_n_tokens": 1}
    sent = {row.names[0]: names[row.option] for row in rows(dialect) if row.option in names}
    needed = {"do_sample": True} if dialect is Dialect.TGI else {"logprobs": True} if dialect is Dialect.CHAT else {}
    model, body = BODIES[dialect]
    lowest = {"max_client_batch_size": 1, "max_best_of": 1, "max_stop_sequences": 0, "max_top_n_tokens": 0}
    limits = Limits.chosen(lowest, **{name: getattr(LIMITS, name) for name in OTHER_LIMITS})
    for name, value in sent.items():
        read(dialect, **needed, **{name: value})
        with pytest.raises(InvalidRequest) as refusal:
            OptionReader(limits, VOCAB_SIZE).read(validate(model, body | needed | {name: value}), dialect)
        assert last_name(refusal.value) == name


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    ("option", "value", "beside", "fault"),
    [
        ("truncate", 3, "images", "cannot be used with images"),
        ("min_tokens", 3, "grammar", "cannot be used with a grammar or tools"),
        ("allowed_token_ids", [5], "grammar", "cannot be used with a grammar or tools"),
        ("allowed_token_ids", [5], "", "cannot be used: no grammars here"),
        ("thinking_token_budget", 0, "", "cannot be used: no thoughts here"),
    ],
)
def test_what_cannot_be_used_with_the_rest_of_a_request_or_on_a_server_is_named(
    dialect: Dialect, option: str, value: Any, beside: str, fault: str
):
    (row,) = (each for each in rows(dialect) if each.option == option)
    lacking = {"grammars": "no grammars here", "thoughts": "no thoughts here"}
    name = row.names[0]
    with pytest.raises(InvalidRequest, match=fault) as refusal:
        check_company(read(dialect, **{name: value}), dialect, {beside}, {} if beside else lacking)
    assert last_name(refusal.value) == name
    check_company(read(dialect, **{name: value}), dialect, (), {})
    check_company(read(dialect, thinking_token_budget=-1, min_tokens=0), dialect, {"grammar", "images"}, lacking)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_priority_that_a_request_may_not_have_is_named(dialect: Dialect):
    model, body = BODIES[dialect]
    request = validate(model, body | {"priority": -1})
    assert OptionReader(LIMITS, VOCAB_SIZE).read(request, dialect, lowest_priority=-1).priority == -1
    with pytest.raises(InvalidRequest, match="is -1; the lowest that this request may have is 0") as refusal:
        OptionReader(LIMITS, VOCAB_SIZE).read(request, dialect, lowest_priority=0)
    assert last_name(refusal.value) == "priority"


@pytest.mark.parametrize("dialect", Dialect)
def test_an_option_that_is_refused_with_another_is_named(dialect: Dialect):
    with pytest.raises(InvalidRequest, match=r"cannot be used with `(\w+\.)?allowed_token_ids`") as refusal:
        read(dialect, thinking_token_budget=0, allowed_token_ids=[5])
    assert last_name(refusal.value) == "thinking_token_budget"
