"""Measures the cost of a call on its way through llm_functionalities, and the calls a second that it carries.

    python -m benchmarks.front_service
    python -m benchmarks.front_service --rate 500 --seconds 30 --cores 0,1

A stand-in for the model server answers at once, in a process of its own, so all time is the service's and the
machine's. Three processes share the cores: the stand-in, the service and the callers.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import psutil
from huggingface_hub import InferenceClient, constants

from benchmarks.report import percentile, table
from shared.stubs import llm_pb2, llm_pb2_grpc

ANSWER = b'{"generated_text":"An answer of a few words."}'
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
PROMPT = "Below is an instruction. " * 20
REQUEST = llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=16)
WARM_UP = 200
ALLOWED_OVERHEAD_MS = 2.0
LOST_SECONDS = 5.0
PERCENTILES = (50, 90, 99)


class InstantModel(asyncio.Protocol):
    """Answers every HTTP request the moment that its last byte is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            length = re.search(rb"content-length: *(\d+)", self._received[:end], re.IGNORECASE)
            size = end + 4 + (int(length.group(1)) if length else 0)
            if len(self._received) < size:
                return
            self._received = self._received[size:]
            self._transport.write(RESPONSE)


async def serve_instantly() -> None:
    server = await asyncio.get_running_loop().create_server(InstantModel, "127.0.0.1", 0)
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    await server.serve_forever()


@contextmanager
def started(*command: str) -> Iterator[tuple[psutil.Process, int]]:
    """Runs a Python module in a process of its own. Gives the process, and the port that it says it listens on."""
    process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"listening on \S*:(\d+)", line):
                yield psutil.Process(process.pid), int(match.group(1))
                break
        else:
            sys.exit(f"{command[0]} did not start")
    finally:
        process.terminate()
        process.wait()


def one_by_one(call: Callable[[], object], count: int) -> list[float]:
    """Returns the milliseconds of each of `count` calls, made one after another."""
    times = []
    for _ in range(WARM_UP + count):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e3)
    return times[WARM_UP:]


async def at_rate(address: str, rate: float, duration: float) -> list[tuple[float, str]]:
    """Makes calls at a fixed rate, whether or not earlier ones have ended. Returns milliseconds and text of each
    response."""
    responses: list[tuple[float, str]] = []

    async def call(stub: llm_pb2_grpc.LLMRunnerStub, due: float) -> None:
        try:
            response = await stub.call_model(REQUEST)
        except grpc.aio.AioRpcError:
            return
        responses.append(((time.perf_counter() - due) * 1e3, response.text))

    async with grpc.aio.insecure_channel(address) as channel:
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        await asyncio.gather(*(call(stub, 0.0) for _ in range(WARM_UP)))
        responses.clear()
        begun, calls = time.perf_counter(), []
        for number in range(int(rate * duration)):
            due = begun + number / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            calls.append(asyncio.create_task(call(stub, due)))
        await asyncio.wait(calls, timeout=LOST_SECONDS)
    return responses


async def most_calls(address: str, callers: int, duration: float) -> float:
    """Returns the calls a second of `callers` that each make one call after another."""
    calls = 0

    async def caller(stub: llm_pb2_grpc.LLMRunnerStub, until: float) -> None:
        nonlocal calls
        while time.perf_counter() < until:
            await stub.call_model(REQUEST)
            calls += 1

    async with grpc.aio.insecure_channel(address) as channel:
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        until = time.perf_counter() + duration
        await asyncio.gather(*(caller(stub, until) for _ in range(callers)))
    return calls / duration


def measure_overhead(model_port: int, service_port: int, count: int) -> float:
    """Prints what a call costs. Returns the service's share of the median, in milliseconds."""
    constants.HF_HUB_DISABLE_TELEMETRY = True
    client = InferenceClient(model=f"http://127.0.0.1:{model_port}/generate", token="none", timeout=10)
    direct = one_by_one(lambda: client.text_generation(PROMPT, max_new_tokens=16), count)
    with grpc.insecure_channel(f"127.0.0.1:{service_port}") as channel:
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        through = one_by_one(lambda: stub.call_model(REQUEST), count)
    named = {"InferenceClient to the model server": direct, "gRPC through the service": through}
    rows = [[name, *milliseconds(times)] for name, times in named.items()]
    print(table(("one call at a time", "p50 ms", "p90 ms", "p99 ms"), rows))
    return (percentile(through, 50) or 0.0) - (percentile(direct, 50) or 0.0)


def measure_rate(service: psutil.Process, port: int, rate: float, seconds: float) -> bool:
    """Prints how the service bears `rate` calls a second. Returns True if it answered them all."""
    used, begun = sum(service.cpu_times()[:2]), time.perf_counter()
    responses = asyncio.run(at_rate(f"127.0.0.1:{port}", rate, seconds))
    cores = (sum(service.cpu_times()[:2]) - used) / (time.perf_counter() - begun)
    lost = int(rate * seconds) - len(responses)
    empty = sum(not text for _, text in responses)
    cells = [f"{rate:g}", *map(str, (len(responses), empty, lost)), *milliseconds([each for each, _ in responses])]
    columns = ("calls a second", "answered", "empty", "lost", "p50 ms", "p90 ms", "p99 ms", "cores of the service")
    print(table(columns, [[*cells, f"{cores:.2f}"]]))
    return lost == 0 and empty == 0


def milliseconds(times: list[float]) -> list[str]:
    return [f"{percentile(times, percent) or 0.0:.2f}" for percent in PERCENTILES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000, help="calls for the overhead (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=500, help="calls a second of the load with a rate (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=10, help="length of each load (default: %(default)s)")
    parser.add_argument(
        "--callers", type=int, default=32, help="callers at once, for the maximum rate (default: %(default)s)"
    )
    parser.add_argument("--cores", help="cores that all processes share, such as 0,1 (default: any)")
    parser.add_argument("--instant-model", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.instant_model:
        asyncio.run(serve_instantly())
        return
    if arguments.cores:
        psutil.Process().cpu_affinity([int(core) for core in arguments.cores.split(",")])
    with started("benchmarks.front_service", "--instant-model") as (_, model_port):
        command = ("llm_functionalities", "--port", "0", "--endpoint", f"127.0.0.1:{model_port}")
        with started(*command) as (service, port):
            overhead = measure_overhead(model_port, port, arguments.calls)
            print(f"\noverhead at the median: {overhead:.2f} ms (allowed: {ALLOWED_OVERHEAD_MS:g} ms)\n")
            bore = measure_rate(service, port, arguments.rate, arguments.seconds)
            most = asyncio.run(most_calls(f"127.0.0.1:{port}", arguments.callers, arguments.seconds))
            print(f"\nmost, with {arguments.callers} callers one call after another: {most:.0f} calls/s")
    if overhead > ALLOWED_OVERHEAD_MS or not bore:
        sys.exit("the service is slower than it has to be")


if __name__ == "__main__":
    main()
