"""`oatmill demo`: starts both services on free ports, makes real gRPC calls, shows answers, and stops everything."""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import grpc

from oatmill.services import (
    RunningService,
    interrupt_on_signals,
    is_listening,
    is_ready,
    llm_functionalities,
    loading_progress,
    text_generation_server,
)
from shared.addresses import free_ports
from shared.stubs import llm_pb2, llm_pb2_grpc
from tgi_server import demo_model

# Seconds without progress.
PATIENCE_SECONDS = 120.0
PROGRESS_SECONDS = 2.0
POLL_SECONDS = 0.05
TIMEOUT_MS = 30_000
MAX_TOKENS = 100
SHOWN_LOG_LINES = 20

QUESTION = "What can I use instead of butter?"
QUESTIONS = (
    "How long do I boil potatoes?",
    "Which tool do I need to hang a picture?",
    "Tell me a joke.",
    "How do I sharpen a knife?",
)

T = TypeVar("T")


class DemoError(Exception):
    """Raised when something did not work, with the reason."""


def main(arguments: Sequence[str]) -> int:
    """Runs the demo. Returns 0 if every call got the expected answer, 1 otherwise."""
    description = "Starts both services on free ports, makes gRPC calls, and stops them."
    argparse.ArgumentParser(prog="oatmill demo", description=description).parse_args(arguments)
    interrupt_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        try:
            with _services(logs) as (services, url, stub):
                _ask_too_early(stub)
                print("\nloading: the demo model", flush=True)
                seconds = wait_until(
                    "a call is answered", lambda: _is_answered(url, stub), services, lambda: loading_progress(url)
                )
                print(f"ready: after {seconds:.1f} s", flush=True)
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
def _services(logs: Path) -> Iterator[tuple[list[RunningService], str, llm_pb2_grpc.LLMRunnerStub]]:
    """Runs both services. Yields them, the model server's URL, and a stub of the gRPC service once it serves."""
    http_port, grpc_port = free_ports(2)
    url = f"http://127.0.0.1:{http_port}"
    services: list[RunningService] = []
    with (logs / "llm_functionalities.log").open("w") as front_log, (logs / "model server.log").open("w") as model_log:
        try:
            print(f"starting: llm_functionalities (gRPC) on port {grpc_port}", flush=True)
            services.append(llm_functionalities(grpc_port, url, output=front_log))
            wait_until("llm_functionalities listens", lambda: is_listening(grpc_port), services)
            print(f"starting: the model server (HTTP) on port {http_port}", flush=True)
            flags = (f"--model-id={demo_model.PATH}", "--hostname=127.0.0.1", "--prometheus-port=0")
            services.append(text_generation_server(f"--port={http_port}", *flags, output=model_log))
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                yield services, url, llm_pb2_grpc.LLMRunnerStub(channel)
        finally:
            print("\nstopping", flush=True)
            codes = [service.stop() for service in reversed(services)]
        if any(codes):
            raise DemoError(f"a service did not stop as it should: exit codes {codes}")


def _ask_too_early(stub: llm_pb2_grpc.LLMRunnerStub) -> None:
    print("\na call while the model server is still starting")
    answer, seconds = _timed(lambda: stub.call_model(_request(QUESTION)))
    _show(QUESTION, answer.text or "(empty)")
    print(f"  {seconds * 1000:.0f} ms", flush=True)
    if answer.text:
        raise DemoError("there was an answer before there was a model")


def _is_answered(url: str, stub: llm_pb2_grpc.LLMRunnerStub) -> bool:
    """Returns True if the answer comes from the model. The front service checks an unavailable model every second."""
    return is_ready(url) and bool(stub.call_model(_request(QUESTION)).text)


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
    print(f"  {seconds * 1000:.0f} ms", flush=True)


def _show(question: str, answer: str) -> None:
    if not answer:
        raise DemoError(f"there was no answer to {question!r}")
    print(f"  prompt: {question}\n  answer: {answer}")


def _request(question: str) -> llm_pb2.ModelRequest:
    return llm_pb2.ModelRequest(formatted_prompt=_prompt(question), max_tokens=MAX_TOKENS, timeout=TIMEOUT_MS)


def _prompt(question: str) -> str:
    """Returns a prompt in the form that callers of this service use."""
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{question}\n\n### Response:\n"
    )


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.monotonic()
    return call(), time.monotonic() - start


def wait_until(
    what: str, condition: Callable[[], bool], services: Sequence[RunningService], progress: Callable[[], str] = str
) -> float:
    """Returns the seconds until `condition` holds.

    progress: returns the progress as text. Raises DemoError when a service ends, or nothing changes for too long.
    """
    start = changed = time.monotonic()
    report = start + PROGRESS_SECONDS
    reached = ""
    while not condition():
        for service in services:
            if service.exit_code() is not None:
                raise DemoError(f"{service.name} ended with exit code {service.exit_code()}")
        now = time.monotonic()
        if (current := progress()) != reached:
            reached, changed = current, now
        if now - changed > PATIENCE_SECONDS:
            raise DemoError(f"no progress within {PATIENCE_SECONDS:.0f} s: waited until {what}")
        if now > report:
            print(f"  {now - start:.0f} s{f', {reached}' if reached else ''}", flush=True)
            report += PROGRESS_SECONDS
        time.sleep(POLL_SECONDS)
    return time.monotonic() - start
