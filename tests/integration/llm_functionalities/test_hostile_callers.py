"""Requests that are meant to harm others: their sender gets a clear error, and no other caller waits for it."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llm_functionalities.endpoint.endpoint import MORE_EVENTS
from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.fakes.model_server import ModelServer
from tests.integration.llm_functionalities.health_watch import health_is_quick
from tests.integration.llm_functionalities.service import Service, ask, reason, running_service
from tests.timing import SECONDS, on_a_busy_machine, until

Runner = llm_pb2_grpc.LLMRunnerStub
MEBIBYTE = 2**20


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


def many_replacements(count: int) -> llm_pb2.AdjustedStepGenerationRequest:
    text = "Stir the oat milk into the flour, then fold in the eggs and the sugar. " * 5
    return llm_pb2.AdjustedStepGenerationRequest(
        task_title="Pancakes",
        step=[
            llm_pb2.ExecutionStep(unique_id=str(i), response=llm_pb2.OutputInteraction(speech_text=f"{text} {i}"))
            for i in range(count)
        ],
        ingredient=[
            llm_pb2.ReplacedIngredient(
                original=llm_pb2.Ingredient(name=f"spice {i}"), replacement=llm_pb2.Ingredient(name=f"herb {i}")
            )
            for i in range(count)
        ],
    )


@pytest.mark.slow
@on_a_busy_machine
def test_many_steps_and_ingredients_hold_nobody_up(server: ModelServer) -> None:
    request = many_replacements(600)
    flags = ("--endpoint", server.url, "--max-batch-prompts", "600")
    with running_service(*flags) as service, service.channel() as channel, health_is_quick(service):
        started = time.monotonic()
        response = llm_pb2_grpc.LLMReplacementGenerationStub(channel).rewrite_steps(request)
        assert time.monotonic() - started < 5
        assert list(response.step_text) == [step.response.speech_text for step in request.step]
        for _ in range(10):
            started = time.monotonic()
            assert Runner(channel).call_model(llm_pb2.ModelRequest(formatted_prompt="x", timeout=1500)).text
            assert time.monotonic() - started < 1.5


@on_a_busy_machine
@pytest.mark.slow
def test_worker_threads_leave_the_event_loop_its_share_of_the_interpreter() -> None:
    """Work of whole seconds in all threads at once: a call that needs nothing of it is answered within milliseconds."""
    request, small = many_replacements(200), llm_pb2.ModelRequest(formatted_prompt="x")
    flags = ("--endpoint", "http://127.0.0.1:9", "--default-timeout", "2")
    with running_service(*flags) as service, service.channel() as channel, service.runner() as other:
        assert reason(other)[1] == "unreachable"
        stub = llm_pb2_grpc.LLMReplacementGenerationStub(channel)
        calls = [stub.rewrite_steps.future(request) for _ in range(6)]
        took = []
        while not all(call.done() for call in calls):
            started = time.monotonic()
            other.call_model(small)
            took.append(time.monotonic() - started)
            time.sleep(0.02)
        assert sorted(took)[len(took) // 2] < 0.02


TOO_MANY = 300_000
LISTS = {
    "batch": (Runner, "batch_call_model", llm_pb2.ModelBatchRequest(formatted_prompts=[""] * TOO_MANY)),
    "texts": (Runner, "generate_summaries", llm_pb2.TGIMultipleSummaryRequest(input_text=[""] * TOO_MANY)),
    "summaries": (
        llm_pb2_grpc.LLMSummaryGenerationStub,
        "generate_summaries",
        llm_pb2.MultipleSummaryGenerationRequest(step_text=["x"], more_details=[""] * TOO_MANY),
    ),
    "descriptions": (
        llm_pb2_grpc.LLMDescriptionGenerationStub,
        "generate_descriptions",
        llm_pb2.LLMMultipleDescriptionGenerationRequest(task_title=["x"], domains=[""] * TOO_MANY),
    ),
    "questions": (
        llm_pb2_grpc.LLMProactiveQuestionGenerationStub,
        "generate_proactive_question",
        llm_pb2.ProactiveQuestionGenerationRequest(current_step=["x"], previous_steps=[""] * TOO_MANY),
    ),
    "steps": (
        llm_pb2_grpc.LLMReplacementGenerationStub,
        "rewrite_steps",
        llm_pb2.AdjustedStepGenerationRequest(ingredient=[llm_pb2.ReplacedIngredient()] * TOO_MANY),
    ),
    "a task's steps": (
        llm_pb2_grpc.LLMExecutionSearchManagerStub,
        "generate_decision",
        llm_pb2.ExecutionSearchRequest(taskmap=llm_pb2.TaskMap(steps=[llm_pb2.ExecutionStep()] * TOO_MANY)),
    ),
}
FIELDS = {
    "batch": "formatted_prompts",
    "texts": "input_text",
    "summaries": "more_details",
    "descriptions": "domains",
    "questions": "previous_steps",
    "steps": "ingredient",
    "a task's steps": "taskmap.steps",
}


@pytest.fixture(scope="module")
def idle_service() -> Iterator[Service]:
    with running_service() as service:
        yield service


@pytest.mark.parametrize("name", LISTS)
@on_a_busy_machine
def test_a_list_that_is_too_long_is_refused_by_name(name: str, idle_service: Service) -> None:
    stub, method, request = LISTS[name]
    with idle_service.channel() as channel, health_is_quick(idle_service):
        calls = [getattr(stub(channel), method).future(request) for _ in range(8)]
        for call in calls:
            code, details = refusal(call.result)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert f"`{FIELDS[name]}` has more than 256 entries" in details
            assert "--max-batch-prompts" in details


def test_as_many_prompts_as_allowed_are_answered_and_one_more_is_refused(server: ModelServer) -> None:
    flags = ("--endpoint", server.url, "--max-batch-prompts", "5")
    with running_service(*flags) as service, service.runner() as runner:
        allowed = llm_pb2.ModelBatchRequest(formatted_prompts=["x"] * 5)
        assert list(runner.batch_call_model(allowed).text) == ["a fine answer"] * 5
        request = llm_pb2.ModelBatchRequest(formatted_prompts=["x"] * 6)
        code, details = refusal(lambda: runner.batch_call_model(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "more than 5 entries" in details


@on_a_busy_machine
def test_a_request_of_very_many_fields_is_refused_before_it_is_parsed(idle_service: Service) -> None:
    with idle_service.channel() as channel, health_is_quick(idle_service):
        call = channel.unary_unary("/LLMRunner/call_model")
        unknown_fields = b"\xa0\x06\x01" * 1_000_000
        code, details = refusal(lambda: call(unknown_fields))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "fields" in details
        assert refusal(lambda: call(b"\x0a\x05ab"))[0] == grpc.StatusCode.INVALID_ARGUMENT


def resident_bytes(service: Service) -> int:
    with open(f"/proc/{service.process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
def test_a_batch_costs_memory_only_as_it_is_worked_on(server: ModelServer) -> None:
    server.fault, server.sick = "hang", False
    count = 50_000
    flags = ("--endpoint", server.url, "--max-batch-prompts", str(count), "--threads", "4")
    with running_service(*flags) as service, service.runner() as runner:
        assert reason(runner, timeout_ms=50) == ("", "deadline")
        before = resident_bytes(service)
        request = llm_pb2.ModelBatchRequest(formatted_prompts=[""] * count, timeout=2000)
        batch = runner.batch_call_model.future(request)
        until(lambda: len(server.requests) >= 3)
        time.sleep(0.3)
        assert resident_bytes(service) - before < 20 * MEBIBYTE
        assert list(batch.result().text) == [""] * count


@on_a_busy_machine
def test_a_call_may_not_take_longer_than_the_longest_time(server: ModelServer) -> None:
    server.fault, server.sick = "hang", False
    flags = ("--endpoint", server.url, "--max-timeout", "0.5", "--default-timeout", "0.2")
    with running_service(*flags) as service, service.runner() as runner:
        for timeout_ms, expected in ((2**31 - 1, 0.5), (60_000, 0.5), (0, 0.2)):
            started = time.monotonic()
            assert reason(runner, timeout_ms=timeout_ms) == ("", "deadline")
            assert expected - 0.05 < time.monotonic() - started < expected + 0.4
        started = time.monotonic()
        request = llm_pb2.ModelRequest(formatted_prompt="x")
        assert runner.call_model(request, timeout=10**7).text == ""
        assert time.monotonic() - started < 0.9


@pytest.mark.slow
def test_abandoned_streams_leave_no_trace(server: ModelServer) -> None:
    server.answer, server.delay = " ".join(["word"] * 200), 0.05
    flags = ("--endpoint", server.url, "--threads", "200")
    with running_service(*flags) as service, service.runner() as runner, ExitStack() as stack:
        # Each has a connection of its own, which has fewer streams than these are together.
        callers = [stack.enter_context(service.runner()) for _ in range(4)]
        threads = service.threads()
        for _ in range(3):
            request = llm_pb2.ModelRequest(formatted_prompt="x", timeout=30_000)
            streams = [caller.stream_model(request) for caller in callers for _ in range(50)]
            for number, stream in enumerate(streams):
                if number % 2:
                    next(stream)
                stream.cancel()
        until(lambda: server.requests != [] and all(request.abandoned.is_set() for request in server.requests))
        assert service.threads() <= threads + 200
        server.delay = 0
        assert ask(runner) != ""


@pytest.mark.slow
def test_a_stream_that_nobody_reads_gives_its_place_back(server: ModelServer) -> None:
    server.answer = " ".join(["x" * 20_000] * 60)
    flags = ("--endpoint", server.url, "--max-concurrent-calls", "2")
    small_window = ("grpc.http2.bdp_probe", 0)
    with running_service(*flags) as service, service.channel(small_window) as channel, service.runner() as other:
        request = llm_pb2.ModelRequest(formatted_prompt="x", timeout=1000)
        streams = [Runner(channel).stream_model(request) for _ in range(2)]
        for stream in streams:
            next(stream)
        server.answer = "a fine answer"
        until(lambda: _is_answered(other))
        for stream in streams:
            stream.cancel()


def _is_answered(runner: Runner) -> bool:
    try:
        return ask(runner) == "a fine answer"
    except grpc.RpcError:
        return False


def test_calls_without_a_message_are_given_up(server: ModelServer) -> None:
    """Requests of headers only hold places; a message that does not come in time gives its place back."""
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait(30)
        yield b""

    flags = ("--endpoint", server.url, "--max-concurrent-calls", "4", "--receive-timeout", "1")
    with running_service(*flags) as service, service.channel() as channel, service.runner() as runner:
        begun: list[grpc.Future] = []

        def takes_all_places() -> bool:
            begun.extend(channel.stream_unary("/LLMRunner/call_model").future(nothing()) for _ in range(4))
            return not _is_answered(runner)

        until(takes_all_places)
        until(lambda: _is_answered(runner))
        codes = [call.code() for call in begun]
        assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) >= 4
        assert set(codes) <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        never.set()


def test_watchers_of_health_do_not_keep_others_from_asking(idle_service: Service) -> None:
    with idle_service.channel() as channel, idle_service.channel() as other:
        watched = [health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(1000)]
        with ThreadPoolExecutor(100) as threads:
            codes = list(threads.map(_first_code, watched))
        assert 0 < codes.count(grpc.StatusCode.OK) <= 64
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        answer = health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert reason(Runner(other)) == ("", "no_endpoint")
        for call in watched:
            call.cancel()


def _first_code(call: grpc.Call) -> grpc.StatusCode:
    try:
        next(call)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_connections_are_bounded(free_port: Callable[[], int]) -> None:
    with running_service("--max-connections", "20") as service, service.runner() as runner:
        assert reason(runner) == ("", "no_endpoint")
        connections = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(100)]
        time.sleep(0.5)
        assert service.sockets() < 60
        assert reason(runner) == ("", "no_endpoint")
        for connection in connections:
            connection.close()
        until(lambda: _is_reachable(service))


def _is_reachable(service: Service) -> bool:
    with service.runner() as runner:
        try:
            return reason(runner) == ("", "no_endpoint")
        except grpc.RpcError:
            return False


SECRET = "the owl flies at midnight"


RESPONSES = [f'"{SECRET}"', f'{{"generated_text": ["{SECRET}"]}}', SECRET, f'[["{SECRET}"]]', f'{{"{SECRET}": 1}}']


def test_neither_prompts_nor_answers_are_logged(server: ModelServer) -> None:
    with running_service("--endpoint", server.url) as service, service.channel() as channel:
        for response in RESPONSES:
            server.raw = response.encode()
            ask(Runner(channel), SECRET)
            list(Runner(channel).stream_model(llm_pb2.ModelRequest(formatted_prompt=SECRET)))
        server.raw = None
        server.answer = SECRET  # no whole sentence
        until(lambda: ask(Runner(channel), SECRET) == SECRET)
        request = llm_pb2.LLMChitChatRequest(user_question=SECRET)
        assert llm_pb2_grpc.LLMChitChatStub(channel).generate_chit_chat(request).text == ""
    assert any("empty answer" in line for line in service.log)
    assert SECRET not in "\n".join(service.log)


@pytest.mark.slow
def test_control_characters_of_an_endpoint_do_not_reach_the_log(server: ModelServer) -> None:
    server.raw = b'{"error": "\\u001b[31mred\\nforged line\\u0007\\u2028x", "error_type": "validation"}'
    server.raw_status = "422 Unprocessable"
    with running_service("--endpoint", server.url) as service, service.runner() as runner:
        assert reason(runner) == ("", "rejected")
    assert not any(line.startswith("forged") for line in service.log)
    assert not any(character in line for line in service.log for character in "\x1b\x07\u2028")


def stream_of(count: int) -> bytes:
    event = b'data:{"token": {"id": 1, "text": "a", "logprob": -0.1, "special": false}, "generated_text": null}\n\n'
    return event * count


HOSTILE: dict[str, dict[str, object]] = {
    "interim": {"fault": "interim"},
    "body": {"fault": "endless"},
    "events": {"raw": stream_of(30_000)},
    "lines": {"raw": b"\n" * 4_000_000},
}


@pytest.mark.parametrize(
    "name", ["events", *(pytest.param(each, marks=pytest.mark.slow) for each in HOSTILE if each != "events")]
)
@on_a_busy_machine
def test_an_endpoint_that_sends_without_end_holds_nobody_up(name: str, server: ModelServer) -> None:
    server.fault, server.raw, server.sick = None, None, False

    def texts(runner: Runner) -> tuple[int, str]:
        stream = runner.stream_model(llm_pb2.ModelRequest(formatted_prompt="x", max_tokens=8, timeout=20_000))
        pieces = len(list(stream))
        return pieces, dict(stream.trailing_metadata())["empty-reason"]

    with (
        running_service("--endpoint", server.url, "--failures-tolerated", "1000") as service,
        service.runner() as runner,
        ThreadPoolExecutor(8) as threads,
    ):
        until(lambda: ask(runner) != "")
        vars(server).update(HOSTILE[name])
        with health_is_quick(service):
            outcomes = list(threads.map(texts, [runner] * 8))
    assert {reason for _, reason in outcomes} == {"bad_answer"}
    assert max(pieces for pieces, _ in outcomes) <= 8 + MORE_EVENTS


LONG = {
    "dots": "." * 4_000_000,
    "closings": "." * 2_000_000 + ")" * 2_000_000,
    "spaces": " " * 3_999_999 + "x",
    "headings": "#" * 4_000_000,
    "abbreviations": "vs. " * 1_000_000,
    "zeros": "\0" * 4_000_000,
    "braces": '{"a":' * 800_000,
    "lines": "1.\n" * 1_300_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@on_a_busy_machine
def test_the_largest_requests_and_answers_hold_nobody_up(name: str, server: ModelServer) -> None:
    text = LONG[name]
    piece = text[:15_000]
    server.answer = text[-12_000:]
    with running_service("--endpoint", server.url) as service, service.channel() as channel:
        calls: list[Callable[[], object]] = [
            lambda: Runner(channel).call_model(llm_pb2.ModelRequest(formatted_prompt=text)),
            lambda: Runner(channel).generate_summary(llm_pb2.TGISummaryRequest(input_text=text)),
            lambda: Runner(channel).batch_call_model(llm_pb2.ModelBatchRequest(formatted_prompts=[piece] * 256)),
            lambda: llm_pb2_grpc.LLMChitChatStub(channel).generate_chit_chat(
                llm_pb2.LLMChitChatRequest(user_question=text)
            ),
            lambda: llm_pb2_grpc.LLMExecutionSearchManagerStub(channel).generate_decision(
                llm_pb2.ExecutionSearchRequest(user_question=text)
            ),
            lambda: llm_pb2_grpc.LLMSummaryGenerationStub(channel).generate_summaries(
                llm_pb2.MultipleSummaryGenerationRequest(step_text=[piece] * 256)
            ),
            lambda: llm_pb2_grpc.LLMProactiveQuestionGenerationStub(channel).generate_proactive_question(
                llm_pb2.ProactiveQuestionGenerationRequest(current_step=[piece] * 256)
            ),
            lambda: llm_pb2_grpc.LLMReplacementGenerationStub(channel).rewrite_steps(
                llm_pb2.AdjustedStepGenerationRequest(
                    step=[llm_pb2.ExecutionStep(response=llm_pb2.OutputInteraction(speech_text=piece))] * 200,
                    ingredient=[llm_pb2.ReplacedIngredient(original=llm_pb2.Ingredient(name="vs"))] * 200,
                )
            ),
        ]
        with health_is_quick(service):
            for call in calls:
                call()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of RFC 9113, section 4.1."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _field(name: bytes, value: bytes) -> bytes:
    """A header as a literal that is not indexed: RFC 7541, section 6.2.2."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4
CANCEL = (8).to_bytes(4)
CALL = b"\x83\x86" + b"".join(
    _field(*each)
    for each in (
        (b":path", b"/LLMRunner/call_model"),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


class Resets:
    """A connection that opens streams and resets them at once, so many a second, until it is closed."""

    def __init__(self, port: int, rate: int) -> None:
        self.sent = 0
        self._rate = rate
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        self._threads[0].join()
        self._connection.shutdown(socket.SHUT_RDWR)
        self._threads[1].join()
        self._connection.close()

    def _send(self) -> None:
        streams = itertools.count(1, 2)
        began = time.monotonic()
        while not self._closing.wait(0.01):
            due = int((time.monotonic() - began) * self._rate) - self.sent
            calls = [
                frame(HEADERS, END_HEADERS, stream, CALL)
                + frame(DATA, END_STREAM, stream, bytes(5))
                + frame(RST_STREAM, 0, stream, CANCEL)
                for stream in itertools.islice(streams, due)
            ]
            self._connection.sendall(b"".join(calls))
            self.sent += due

    def _receive(self) -> None:
        """Acknowledges settings and pings, without which a server waits."""
        with self._connection.makefile("rb") as reader:
            while len(head := reader.read(9)) == 9:
                payload = reader.read(int.from_bytes(head[:3]))
                kind, flags = head[3], head[4]
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self._connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))


@pytest.mark.slow
@on_a_busy_machine
def test_streams_that_are_reset_at_once_cancel_nobody_elses_calls(server: ModelServer) -> None:
    with running_service("--endpoint", server.url) as service, service.runner() as runner:
        assert ask(runner)
        attackers = [Resets(service.port, rate=2000) for _ in range(4)]
        took = []
        try:
            until(lambda: sum(each.sent for each in attackers) > 8000)
            for _ in range(30):
                began = time.monotonic()
                assert ask(runner) == "a fine answer"
                took.append(time.monotonic() - began)
        finally:
            for each in attackers:
                each.close()
        assert max(took) < 0.5
        assert len(server.requests) < sum(each.sent for each in attackers) / 10  # what is reset is hardly ever sent on
    assert any("cancelled 1000 calls in a row" in line for line in service.log)
