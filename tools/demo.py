"""`make demo`: starts both services on free ports, makes real gRPC calls, shows the answers, and stops everything."""

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc

from shared.stubs import llm_pb2, llm_pb2_grpc
from tgi_server import demo_model
from tools.services import Service, is_ready, llm_functionalities, text_generation_server

START_SECONDS = 120.0
PROGRESS_SECONDS = 2.0
TIMEOUT_MS = 30_000
MAX_TOKENS = 100
SHOWN_LOG_LINES = 20

QUESTION = "What can I use instead of butter?"
QUESTIONS = (
    "How long do I boil an egg?",
    "Which tool do I need to hang a picture?",
    "Tell me a joke.",
    "What is Deep Learning?",
)

T = TypeVar("T")


class DemoError(Exception):
    """Something did not work; `str()` of it says what."""


def main() -> int:
    """Returns 0 when every call was answered as it should be, 1 otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        try:
            with _services(logs) as (services, url, stub):
                _ask_too_early(stub)
                _wait_until_ready(services, url)
                _ask_one(stub)
                _ask_many(stub)
        except (DemoError, grpc.RpcError) as error:
            for log in sorted(logs.iterdir()):
                print(f"\nthe last lines of {log.stem}:", *log.read_text().splitlines()[-SHOWN_LOG_LINES:], sep="\n  ")
            print(f"\nfailed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print("stopped: all calls were answered, nothing is left running")
    return 0


@contextlib.contextmanager
def _services(logs: Path) -> Iterator[tuple[list[Service], str, llm_pb2_grpc.LLMRunnerStub]]:
    """Both services, the model server's URL, and a channel to the gRPC service once that one serves."""
    http_port, grpc_port = _free_ports(2)
    url = f"http://127.0.0.1:{http_port}"
    services: list[Service] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_stop, services)
        front_log = stack.enter_context((logs / "llm_functionalities.log").open("w"))
        model_log = stack.enter_context((logs / "model server.log").open("w"))
        print(f"starting: llm_functionalities (gRPC) on port {grpc_port}", flush=True)
        services.append(llm_functionalities(grpc_port, url, output=front_log))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{grpc_port}"))
        _wait_for_channel(channel, services)
        print(f"starting: the model server (HTTP) on port {http_port}", flush=True)
        flags = (f"--model-id={demo_model.PATH}", "--hostname=127.0.0.1", "--prometheus-port=0")
        services.append(text_generation_server(http_port, *flags, output=model_log))
        yield services, url, llm_pb2_grpc.LLMRunnerStub(channel)


def _ask_too_early(stub: llm_pb2_grpc.LLMRunnerStub) -> None:
    print("\na call while the model server is still starting")
    answer, seconds = _timed(lambda: stub.call_model(_request(QUESTION)))
    _show(QUESTION, answer.text or "(empty)")
    print(f"  {seconds * 1000:.0f} ms", flush=True)
    if answer.text:
        raise DemoError("there was an answer before there was a model")


def _ask_one(stub: llm_pb2_grpc.LLMRunnerStub) -> None:
    print("\na single prompt")
    answer, seconds = _timed(lambda: stub.call_model(_request(QUESTION)))
    _show(QUESTION, answer.text)
    print(f"  {seconds * 1000:.0f} ms", flush=True)


def _ask_many(stub: llm_pb2_grpc.LLMRunnerStub) -> None:
    print(f"\na batch of {len(QUESTIONS)} prompts")
    request = llm_pb2.ModelBatchRequest(
        formatted_prompts=map(_prompt, QUESTIONS), max_tokens=MAX_TOKENS, timeout=TIMEOUT_MS
    )
    answers, seconds = _timed(lambda: stub.batch_call_model(request))
    for question, text in zip(QUESTIONS, answers.text, strict=True):
        _show(question, text)
    print(f"  {seconds * 1000:.0f} ms\n", flush=True)


def _show(question: str, answer: str) -> None:
    if not answer:
        raise DemoError(f"there was no answer to {question!r}")
    print(f"  prompt: {question}\n  answer: {answer}")


def _request(question: str) -> llm_pb2.ModelRequest:
    return llm_pb2.ModelRequest(formatted_prompt=_prompt(question), max_tokens=MAX_TOKENS, timeout=TIMEOUT_MS)


def _prompt(question: str) -> str:
    """In the form that the callers of this service use."""
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{question}\n\n### Response:\n"
    )


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.monotonic()
    return call(), time.monotonic() - start


def _wait_for_channel(channel: grpc.Channel, services: list[Service]) -> None:
    ready = grpc.channel_ready_future(channel)
    for _ in range(int(START_SECONDS / PROGRESS_SECONDS)):
        with contextlib.suppress(grpc.FutureTimeoutError):
            ready.result(PROGRESS_SECONDS)
            return
        _check_running(services)
    raise DemoError(f"{services[0].name} did not start within {START_SECONDS:.0f} s")


def _wait_until_ready(services: list[Service], url: str) -> None:
    print("\nloading: the demo model", end="", flush=True)
    start = time.monotonic()
    report = start + PROGRESS_SECONDS
    while not is_ready(url):
        _check_running(services)
        if time.monotonic() - start > START_SECONDS:
            raise DemoError(f"the model server was not ready within {START_SECONDS:.0f} s")
        if time.monotonic() > report:
            print(f" ... {time.monotonic() - start:.0f} s", end="", flush=True)
            report += PROGRESS_SECONDS
        time.sleep(0.1)
    print(f"\nready after {time.monotonic() - start:.1f} s", flush=True)


def _check_running(services: list[Service]) -> None:
    for service in services:
        if service.exit_code() is not None:
            raise DemoError(f"{service.name} ended with exit code {service.exit_code()}")


def _stop(services: list[Service]) -> None:
    print("stopping", flush=True)
    for service in reversed(services):
        if (code := service.stop()) != 0:
            raise DemoError(f"{service.name} ended with exit code {code}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    sys.exit(main())
