"""`LLMRunner` as applications call it: a real process, real gRPC clients, a model server that the tests control."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.fakes.model_server import ModelServer
from tests.integration.llm_functionalities.contracts import messages
from tests.integration.llm_functionalities.service import Service, ask, reason, running_service
from tests.timing import SECONDS, on_a_busy_machine, until

Runner = llm_pb2_grpc.LLMRunnerStub
# A caller may have its response this long after its deadline.
SLACK_SECONDS = 0.05


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture(scope="module")
def service(shared_server: ModelServer) -> Iterator[Service]:
    with running_service(
        "--endpoint", shared_server.url, "--threads", "8", "--batch-threads", "4", "--max-batch-prompts", "1000"
    ) as service:
        yield service


@pytest.fixture
def server(shared_server: ModelServer) -> ModelServer:
    """Healthy, and without a memory of earlier tests."""
    shared_server.fault, shared_server.delay, shared_server.answer = None, 0.0, "a fine answer"
    shared_server.headers, shared_server.raw, shared_server.raw_status = {}, None, "200 OK"
    shared_server.requests.clear()
    return shared_server


@pytest.fixture
def runner(service: Service, server: ModelServer) -> Iterator[Runner]:
    with service.runner() as runner:
        until(lambda: ask(runner) != "")
        server.requests.clear()
        yield runner


def test_a_prompt_goes_to_the_model_as_it_is_and_its_answer_comes_back(runner: Runner, server: ModelServer) -> None:
    prompt = "  ### Instruction:\nSay “héllo”.\n\n### Response:\n"
    server.answer = "\n héllo \n"
    response = runner.call_model(llm_pb2.ModelRequest(formatted_prompt=prompt, max_tokens=7))
    assert response.text == "héllo"
    (request,) = server.requests
    assert request.path == "/generate"
    assert request.prompt == prompt
    assert request.body["parameters"] == {"max_new_tokens": 7, "return_full_text": False}
    assert "authorization" not in request.headers


def test_an_adapter_is_passed_on(runner: Runner, server: ModelServer) -> None:
    request = llm_pb2.ModelRequest(formatted_prompt="one", adapter_id="chef")
    runner.call_model(request)
    list(runner.stream_model(request))
    runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=["two"], adapter_id="chef"))
    assert [each.body["parameters"]["adapter_id"] for each in server.requests] == ["chef"] * 3


DRAWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 2**63, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({}, {}),
        (DRAWN, {**DRAWN, "do_sample": True}),
        ({"temperature": 0, "top_p": 0.5, "frequency_penalty": 0.5}, {"do_sample": False, "frequency_penalty": 0.5}),
        ({"seed": 0}, {"seed": 0}),
    ],
    ids=["none", "drawn", "greedy", "seed"],
)
def test_options_of_sampling_are_passed_on(
    runner: Runner, server: ModelServer, sampling: dict[str, float], sent: dict[str, float]
) -> None:
    chosen = llm_pb2.Sampling(**sampling)  # type: ignore[arg-type]
    request = llm_pb2.ModelRequest(formatted_prompt="one", sampling=chosen, stop=["\n", "END"], max_tokens=9)
    runner.call_model(request)
    list(runner.stream_model(request))
    batch = llm_pb2.ModelBatchRequest(formatted_prompts=["two"], sampling=chosen, stop=["\n", "END"], max_tokens=9)
    runner.batch_call_model(batch)
    expected = {"max_new_tokens": 9, "return_full_text": False, "stop": ["\n", "END"], **sent}
    details = {"details": True}
    assert [each.body["parameters"] for each in server.requests] == [expected, {**details, **expected}, expected]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "`sampling.temperature` is -0.5; give a number of at least 0, or leave it out"),
        ({"temperature": float("nan")}, "`sampling.temperature` is nan"),
        ({"top_p": 0}, "`sampling.top_p` is 0; give a number above 0, at most 1, or leave it out"),
        ({"top_k": 0}, "`sampling.top_k` is 0; give a number of at least 1"),
        ({"repetition_penalty": 0}, "`sampling.repetition_penalty` is 0"),
        ({"frequency_penalty": 2.5}, "`sampling.frequency_penalty` is 2.5; give a number from -2 to 2"),
    ],
)
def test_options_out_of_range_are_refused(runner: Runner, fields: dict[str, float], message: str) -> None:
    sampling = llm_pb2.Sampling(**fields)  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError, match=re.escape(message)) as refused:
        runner.call_model(llm_pb2.ModelRequest(formatted_prompt="one", sampling=sampling))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("stop", "message"), [([""], "`stop` has an empty text"), ("</answer>", "a string was given")])
def test_stop_texts_that_cannot_be_meant_are_refused(runner: Runner, stop: list[str], message: str) -> None:
    with pytest.raises(grpc.RpcError, match=message) as refused:
        runner.call_model(llm_pb2.ModelRequest(formatted_prompt="one", stop=stop))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_images_are_passed_on_before_the_prompt(runner: Runner, server: ModelServer) -> None:
    request = llm_pb2.ModelRequest(formatted_prompt="What is it?", images=[b"\xff\xd8a", b"\x89PNG"])
    runner.call_model(request)
    list(runner.stream_model(request))
    expected = "![](data:image/jpeg;base64,/9hh)![](data:image/png;base64,iVBORw==)What is it?"
    assert [each.prompt for each in server.requests] == [expected] * 2


OBJECT_PROMPT = '### Instruction:\nAnswer like {"intent": ""}.\n\n### Response: Your response:{"intent":'


def test_a_prompt_that_ends_inside_an_object_gets_the_object(runner: Runner, server: ModelServer) -> None:
    server.answer = ' "continue_current_task"}\n\n### Instruction:\n{"intent": "x"}'
    whole = '{"intent": "continue_current_task"}'
    request = llm_pb2.ModelRequest(formatted_prompt=OBJECT_PROMPT)
    assert runner.call_model(request).text == whole
    batch = llm_pb2.ModelBatchRequest(formatted_prompts=[OBJECT_PROMPT, "x"])
    assert list(runner.batch_call_model(batch).text) == [whole, server.answer.strip()]
    assert "".join(each.text for each in runner.stream_model(request)) == whole
    assert {each.prompt for each in server.requests} == {OBJECT_PROMPT, "x"}
    server.answer = "  "
    assert reason(runner, OBJECT_PROMPT) == ("", "no_text")
    server.answer = '{"intent": "x"}'
    request.grammar.json_schema = '{"type": "object"}'
    assert runner.call_model(request).text == server.answer


@pytest.mark.parametrize(
    ("echo", "answer"),
    [
        ("prompt", OBJECT_PROMPT + ' "continue_current_task"}'),
        ("none", '"continue_current_task"} and so on'),
    ],
)
def test_what_is_repeated_of_a_prompt_is_a_setting(echo: str, answer: str, server: ModelServer) -> None:
    server.answer = ' "continue_current_task"} and so on'
    request = llm_pb2.ModelRequest(formatted_prompt=OBJECT_PROMPT)
    with running_service("--endpoint", server.url, "--prompt-echo", echo) as service, service.runner() as runner:
        assert runner.call_model(request).text == answer
        assert "".join(each.text for each in runner.stream_model(request)).strip() == answer


def test_max_tokens_has_a_default(runner: Runner, server: ModelServer) -> None:
    ask(runner)
    assert server.requests[-1].body["parameters"]["max_new_tokens"] == 128


def test_a_batch_keeps_its_order(runner: Runner, server: ModelServer) -> None:
    server.answer = lambda prompt: f"answer to {prompt}"
    prompts = [f"prompt {number}" for number in range(50)]
    response = runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=prompts))
    assert list(response.text) == [f"answer to {prompt}" for prompt in prompts]


def test_answers_say_why_they_end(runner: Runner, server: ModelServer) -> None:
    server.headers = {"x-prompt-tokens": "7", "x-generated-tokens": "5", "x-finish-reason": "length"}
    response = runner.call_model(llm_pb2.ModelRequest(formatted_prompt="x", max_tokens=5))
    assert (response.finish_reason, response.prompt_tokens, response.generated_tokens) == ("length", 7, 5)
    server.answer = ' "x"} and so on'
    request = llm_pb2.ModelRequest(formatted_prompt=OBJECT_PROMPT)
    assert runner.call_model(request).finish_reason == "stop_sequence"  # the object is whole
    assert [*runner.stream_model(request)][-1].finish_reason == "stop_sequence"
    batch = runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=["x", OBJECT_PROMPT]))
    assert list(batch.finish_reason) == ["length", "stop_sequence"]
    assert (list(batch.prompt_tokens), list(batch.generated_tokens)) == ([7, 7], [5, 5])


@pytest.mark.parametrize("field", ["timeout", "max_tokens"])
def test_a_negative_number_is_refused(field: str, runner: Runner, server: ModelServer) -> None:
    numbers = {field: -5}
    batch = llm_pb2.ModelBatchRequest(formatted_prompts=["x"], **numbers)
    request = llm_pb2.ModelRequest(formatted_prompt="x", **numbers)
    calls = (
        lambda: runner.call_model(request),
        lambda: runner.batch_call_model(batch),
        lambda: next(runner.stream_model(request)),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError, match=f"`{field}` is -5") as error:
            call()
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert server.requests == []


def test_a_string_in_the_place_of_prompts_is_refused(runner: Runner, server: ModelServer) -> None:
    request = llm_pb2.ModelBatchRequest(formatted_prompts="Tell me a story.")
    with pytest.raises(grpc.RpcError, match="a string was given instead of a list") as error:
        runner.batch_call_model(request)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert server.requests == []


def test_what_the_server_says_of_a_request_reaches_its_caller(
    service: Service, runner: Runner, server: ModelServer
) -> None:
    for words in ("`top_p` must be > 0", "there is no adapter 'ch\u00e9f'\x1b"):
        server.raw = json.dumps({"error": words, "error_type": "validation"}).encode()
        server.raw_status = "422 Unprocessable"
        response, call = runner.call_model.with_call(llm_pb2.ModelRequest(formatted_prompt="x"))
        metadata = dict(call.trailing_metadata())
        assert (response.text, metadata["empty-reason"]) == ("", "rejected")
        assert words.encode("unicode_escape").decode() in metadata["empty-message"]
        batch = llm_pb2.ModelBatchRequest(formatted_prompts=["x", "y"])
        _, call = runner.batch_call_model.with_call(batch)
        assert words.encode("unicode_escape").decode() in dict(call.trailing_metadata())["empty-message"]
    until(lambda: all(any(words in line for line in service.log) for words in ("top_p", "no adapter")))
    server.fault, server.raw = 401, None
    _, call = runner.call_model.with_call(llm_pb2.ModelRequest(formatted_prompt="x"))
    assert dict(call.trailing_metadata()).get("empty-message") is None


def test_a_request_id_goes_to_the_model_server_and_into_the_log(
    service: Service, runner: Runner, server: ModelServer
) -> None:
    metadata = (("x-request-id", "id-of-a-caller"),)
    server.raw, server.raw_status = b'{"error": "no such thing", "error_type": "validation"}', "422 Unprocessable"
    request = llm_pb2.ModelRequest(formatted_prompt="x")
    _, call = runner.call_model.with_call(request, metadata=metadata)
    assert dict(call.trailing_metadata())["x-request-id"] == "id-of-a-caller"
    assert dict(call.trailing_metadata())["empty-reason"] == "rejected"
    until(lambda: any("no such thing" in line for line in service.log))
    (line,) = (line for line in service.log if "no such thing" in line)
    assert "WARNING" in line
    assert "request_id=id-of-a-caller" in line
    server.raw = None
    list(runner.stream_model(request, metadata=metadata))
    runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=["x", "y"]), metadata=metadata)
    runner.call_model(request)
    ids = [each.headers["x-request-id"] for each in server.requests[-5:]]
    assert ids[:4] == ["id-of-a-caller"] * 4
    assert ids[4] != ids[0]


def test_an_empty_batch_is_an_empty_answer(runner: Runner, server: ModelServer) -> None:
    assert list(runner.batch_call_model(llm_pb2.ModelBatchRequest()).text) == []
    assert list(runner.generate_summaries(llm_pb2.TGIMultipleSummaryRequest()).summary_text) == []
    assert not server.requests


def test_a_prompt_that_fails_is_empty_in_its_place_only(runner: Runner, server: ModelServer) -> None:
    server.answer = lambda prompt: None if prompt == "bad" else "fine"  # null is no text
    response = runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=["a", "bad", "b", "bad", "c"]))
    assert list(response.text) == ["fine", "", "fine", "", "fine"]


@on_a_busy_machine
def test_the_time_out_holds_for_the_whole_batch(runner: Runner, server: ModelServer) -> None:
    server.requests.clear()
    server.delay = 0.2
    prompts = [str(number) for number in range(20)]  # four at a time
    started = time.monotonic()
    response = runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=prompts, timeout=500))
    assert time.monotonic() - started < 0.5 + SLACK_SECONDS
    texts = list(response.text)
    assert len(texts) == 20
    assert [text for text in texts if text] == ["a fine answer"] * 8
    until(lambda: all(request.abandoned.is_set() for request in server.requests[8:]))
    time.sleep(0.3)
    assert len(server.requests) == 12  # what had not begun never did


def test_summaries(runner: Runner, server: ModelServer) -> None:
    server.answer = lambda prompt: " A summary. " if "### Instruction:" in prompt else "?"
    assert runner.generate_summary(llm_pb2.TGISummaryRequest(input_text="A long text.")).summary_text == "A summary."
    assert "A long text." in server.requests[-1].prompt
    texts = llm_pb2.TGIMultipleSummaryRequest(input_text=["one", " ", "two"])
    assert list(runner.generate_summaries(texts).summary_text) == ["A summary.", "", "A summary."]
    assert runner.generate_summary(llm_pb2.TGISummaryRequest()).summary_text == ""


def test_a_grammar_reaches_the_model_server(runner: Runner, server: ModelServer) -> None:
    grammar = llm_pb2.Grammar(json_schema='{"type": "object", "properties": {"a": {"type": "string"}}}')
    runner.call_model(llm_pb2.ModelRequest(formatted_prompt="x", grammar=grammar))
    value = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert server.requests[-1].body["parameters"]["grammar"] == {"type": "json", "value": value}
    grammar = llm_pb2.Grammar(regex="yes|no")
    runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=["x"], grammar=grammar))
    assert server.requests[-1].body["parameters"]["grammar"] == {"type": "regex", "value": "yes|no"}


@pytest.mark.parametrize("grammar", [llm_pb2.Grammar(json_schema="{"), llm_pb2.Grammar(regex="(a")])
def test_a_grammar_that_is_none_is_the_callers_mistake(
    grammar: llm_pb2.Grammar, runner: Runner, server: ModelServer
) -> None:
    request = llm_pb2.ModelRequest(formatted_prompt="x", grammar=grammar)
    with pytest.raises(grpc.RpcError) as refusal:
        runner.call_model(request)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as refusal:
        list(runner.stream_model(request))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not server.requests


def test_an_empty_answer_of_the_model_is_told_apart(runner: Runner, server: ModelServer) -> None:
    server.answer = " \n "
    assert reason(runner) == ("", "no_text")


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_the_model_refuses_says_nothing_about_the_endpoint(
    status: int, runner: Runner, server: ModelServer
) -> None:
    server.fault = status
    assert {reason(runner) for _ in range(8)} == {("", "rejected")}
    server.fault = None
    assert ask(runner) == "a fine answer"


@pytest.mark.parametrize("fault", ["hang", "trickle"])
@pytest.mark.parametrize("timeout_ms", [50, 300])
@on_a_busy_machine
def test_a_deadline_is_on_the_wall_clock(fault: str, timeout_ms: int, runner: Runner, server: ModelServer) -> None:
    server.fault, server.sick = fault, False
    for _ in range(3):
        started = time.monotonic()
        assert reason(runner, timeout_ms=timeout_ms) == ("", "deadline")
        assert timeout_ms / 1000 - 0.01 < time.monotonic() - started < timeout_ms / 1000 + SLACK_SECONDS
    until(lambda: all(request.abandoned.is_set() for request in server.requests))


@pytest.mark.parametrize("fault", ["hang", "trickle"])
def test_impatient_callers_do_not_make_a_healthy_endpoint_look_dead(
    fault: str, runner: Runner, server: ModelServer
) -> None:
    server.fault, server.sick = fault, False
    for _ in range(12):
        assert reason(runner, timeout_ms=30) == ("", "deadline")
    server.fault = None
    assert ask(runner) == "a fine answer"


@on_a_busy_machine
def test_the_callers_own_deadline_counts_and_the_empty_answer_arrives_before_it(
    runner: Runner, server: ModelServer
) -> None:
    server.fault, server.sick = "hang", False
    for timeout_ms in (0, 60_000):
        started = time.monotonic()
        request = llm_pb2.ModelRequest(formatted_prompt="x", timeout=timeout_ms)
        assert runner.call_model(request, timeout=0.5).text == ""
        assert 0.3 < time.monotonic() - started < 0.5


def test_a_caller_that_goes_away_stops_the_generation(runner: Runner, server: ModelServer) -> None:
    server.delay = 5
    call = runner.call_model.future(llm_pb2.ModelRequest(formatted_prompt="x"))
    until(lambda: len(server.requests) == 1)
    call.cancel()
    assert server.requests[0].abandoned.wait(SECONDS)
    batch = runner.batch_call_model.future(llm_pb2.ModelBatchRequest(formatted_prompts=["x"] * 3))
    until(lambda: len(server.requests) == 4)
    batch.cancel()
    assert all(request.abandoned.wait(SECONDS) for request in server.requests)


@on_a_busy_machine
def test_a_large_batch_does_not_starve_single_calls(runner: Runner, server: ModelServer) -> None:
    server.requests.clear()
    server.delay = 0.05
    prompts = [f"prompt {number}" for number in range(1000)]
    batch = runner.batch_call_model.future(llm_pb2.ModelBatchRequest(formatted_prompts=prompts, timeout=20_000))
    until(lambda: len(server.requests) >= 4)
    waits = []
    for _ in range(20):
        started = time.monotonic()
        assert ask(runner) == "a fine answer"
        waits.append(time.monotonic() - started)
    assert not batch.done()
    assert sorted(waits)[10] < 0.05 + 0.05, waits
    batch.cancel()


@on_a_busy_machine
def test_two_batches_share(runner: Runner, server: ModelServer) -> None:
    server.requests.clear()
    server.delay = 0.02
    first = runner.batch_call_model.future(llm_pb2.ModelBatchRequest(formatted_prompts=["first"] * 400))
    until(lambda: len(server.requests) >= 8)
    started = time.monotonic()
    runner.batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=["second"] * 20))
    assert time.monotonic() - started < 1.0
    assert not first.done()
    first.result()


@on_a_busy_machine
def test_a_stream_comes_in_pieces_as_they_are_written(runner: Runner, server: ModelServer) -> None:
    server.requests.clear()
    server.answer, server.delay = "one two three four", 0.1
    arrivals = []
    pieces = []
    for response in runner.stream_model(llm_pb2.ModelRequest(formatted_prompt="x", max_tokens=9)):
        pieces.append(response.text)
        arrivals.append(time.monotonic())
    assert pieces == ["one", " two", " three", " four", ""]
    assert (response.finish_reason, response.prompt_tokens, response.generated_tokens) == ("eos_token", 7, 4)
    assert all(later - earlier > 0.05 for earlier, later in pairwise(arrivals))
    assert server.requests[0].path == "/generate_stream"
    assert server.requests[0].body["parameters"]["max_new_tokens"] == 9


def test_a_stream_that_is_cancelled_stops_the_generation(runner: Runner, server: ModelServer) -> None:
    server.answer, server.delay = " ".join(["word"] * 100), 0.05
    stream = runner.stream_model(llm_pb2.ModelRequest(formatted_prompt="x", timeout=30_000))
    assert next(stream).text == "word"
    stream.cancel()
    assert server.requests[0].abandoned.wait(SECONDS)


@on_a_busy_machine
def test_a_stream_ends_with_its_time(runner: Runner, server: ModelServer) -> None:
    server.requests.clear()
    server.answer, server.delay = " ".join(["word"] * 100), 0.05
    started = time.monotonic()
    stream = runner.stream_model(llm_pb2.ModelRequest(formatted_prompt="x", timeout=400))
    pieces = [response.text for response in stream]
    assert time.monotonic() - started < 0.4 + SLACK_SECONDS
    assert 4 <= len(pieces) <= 8
    assert dict(stream.trailing_metadata())["empty-reason"] == "deadline"
    assert server.requests[0].abandoned.wait(SECONDS)


@pytest.mark.parametrize("fault", [500, "garbage", "reset"])
def test_a_stream_of_a_broken_server_ends_empty(fault: str | int, runner: Runner, server: ModelServer) -> None:
    server.fault = fault
    assert list(runner.stream_model(llm_pb2.ModelRequest(formatted_prompt="x"))) == []


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (429, "overloaded"),
        (500, "server_error"),
        (503, "server_error"),
        (401, "unauthorized"),
        (403, "unauthorized"),
        (404, "not_found"),
        ("garbage", "bad_answer"),
        ("endless", "bad_answer"),
    ],
)
def test_a_server_that_fails_gives_an_empty_answer_with_its_reason(
    fault: str | int, why: str, runner: Runner, server: ModelServer
) -> None:
    server.fault, server.sick = fault, False
    assert reason(runner) == ("", why)
    assert len(server.requests) == 1  # it is never sent twice


def test_many_callers_at_once(runner: Runner, server: ModelServer) -> None:
    server.answer = lambda prompt: f"answer to {prompt}"
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda number: ask(runner, f"prompt {number}", 10_000), range(400)))
    assert answers == [f"answer to prompt {number}" for number in range(400)]


OLD_CONTRACT = """
ModelRequest: formatted_prompt=1 string, max_tokens=2 int32, timeout=3 int32
ModelResponse: text=1 string
ModelBatchRequest: formatted_prompts=1 repeated string, max_tokens=2 int32, timeout=3 int32
ModelBatchResponse: text=1 repeated string
TGISummaryRequest: input_text=1 string
TGISummaryResponse: summary_text=1 string
TGIMultipleSummaryRequest: input_text=1 repeated string
TGIMultipleSummaryResponse: summary_text=1 repeated string
"""


@pytest.mark.parametrize(
    ("method", "request_type", "response_type", "fields", "answer"),
    [
        ("call_model", "ModelRequest", "ModelResponse", {"formatted_prompt": "x"}, {"text": "a fine answer"}),
        (
            "batch_call_model",
            "ModelBatchRequest",
            "ModelBatchResponse",
            {"formatted_prompts": ["x", "y"], "max_tokens": 5, "timeout": 10_000},
            {"text": ["a fine answer"] * 2},
        ),
        (
            "generate_summary",
            "TGISummaryRequest",
            "TGISummaryResponse",
            {"input_text": "x"},
            {"summary_text": "a fine answer"},
        ),
        (
            "generate_summaries",
            "TGIMultipleSummaryRequest",
            "TGIMultipleSummaryResponse",
            {"input_text": ["x"]},
            {"summary_text": ["a fine answer"]},
        ),
    ],
)
def test_a_client_of_long_ago_is_understood(
    method: str,
    request_type: str,
    response_type: str,
    fields: dict[str, object],
    answer: dict[str, object],
    service: Service,
    server: ModelServer,
) -> None:
    kinds = messages(OLD_CONTRACT)
    with service.channel() as channel:
        call = channel.unary_unary(
            f"/LLMRunner/{method}",
            request_serializer=kinds[request_type].SerializeToString,
            response_deserializer=kinds[response_type].FromString,
        )
        response = call(kinds[request_type](**fields))
    for name, value in answer.items():
        found = getattr(response, name)
        assert (found if isinstance(found, str) else list(found)) == value
