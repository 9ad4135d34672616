"""What a call costs on its way through llm_functionalities, and how many calls a second it carries.

    python -m benchmarks.front_service
    python -m benchmarks.front_service --rate 500 --seconds 30 --cores 0,1

A stand-in for the model server answers at once, in a process of its own, so all time is the service's and the
machine's. Three processes share the cores: the stand-in, the service and the callers.
"""

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from huggingface_hub import InferenceClient, constants

from shared.stubs import llm_pb2, llm_pb2_grpc

ANSWER = b'{"generated_text":"An answer of a few words."}'
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
PROMPT = "Below is an instruction. " * 20
WARM_UP = 200
ALLOWED_OVERHEAD_MS = 2.0
LOST_SECONDS = 5.0


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
def started(*command: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A Python module in a process of its own, and the port that it says it listens on."""
    process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"listening on \S*:(\d+)", line):
                yield process, int(match.group(1))
                break
        else:
            sys.exit(f"{command[0]} did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def one_by_one(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, made one after another."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds


class Load:
    """Calls made at a fixed rate, whether or not earlier ones have ended."""

    def __init__(self, address: str, rate: float) -> None:
        self._address = address
        self._rate = rate
        self.seconds: list[float] = []
        self.empty = 0
        self.failed = 0

    async def run(self, duration: float) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = llm_pb2_grpc.LLMRunnerStub(channel)
            await asyncio.gather(*(self._call(stub, note=False) for _ in range(WARM_UP)))
            begun = time.perf_counter()
            calls = []
            for number in range(int(self._rate * duration)):
                due = begun + number / self._rate
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                calls.append(asyncio.create_task(self._call(stub, note=True, due=due)))
            await asyncio.wait(calls, timeout=LOST_SECONDS)

    async def _call(self, stub: llm_pb2_grpc.LLMRunnerStub, *, note: bool, due: float = 0.0) -> None:
        try:
            response = await stub.call_model(llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=16))
        except grpc.aio.AioRpcError:
            self.failed += 1
            return
        if note:
            self.seconds.append(time.perf_counter() - due)
            self.empty += not response.text


async def most_calls(address: str, callers: int, duration: float) -> float:
    """Calls a second of `callers` that each make one call after another."""
    calls = 0

    async def caller(stub: llm_pb2_grpc.LLMRunnerStub, until: float) -> None:
        nonlocal calls
        while time.perf_counter() < until:
            await stub.call_model(llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=16))
            calls += 1

    async with grpc.aio.insecure_channel(address) as channel:
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        until = time.perf_counter() + duration
        await asyncio.gather(*(caller(stub, until) for _ in range(callers)))
    return calls / duration


def cpu_seconds(process: "subprocess.Popen[str]") -> float:
    """What a process has used so far."""
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 for share in (0.5, 0.9, 0.99)]
    return " | ".join(f"{value:.2f}" for value in at)


def measure_overhead(model_port: int, service_port: int, count: int) -> float:
    """Prints what a call costs, in milliseconds; returns the service's share at the median."""
    constants.HF_HUB_DISABLE_TELEMETRY = True
    client = InferenceClient(model=f"http://127.0.0.1:{model_port}/generate", token="none", timeout=10)
    direct = one_by_one(lambda: client.text_generation(PROMPT, max_new_tokens=16), count)
    with grpc.insecure_channel(f"127.0.0.1:{service_port}") as channel:
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        request = llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=16)
        through = one_by_one(lambda: stub.call_model(request), count)
    print("| one call at a time | p50 ms | p90 ms | p99 ms |\n|---|--:|--:|--:|")
    print(f"| InferenceClient to the model server | {percentiles(direct)} |")
    print(f"| gRPC through the service | {percentiles(through)} |")
    return (statistics.median(through) - statistics.median(direct)) * 1000


def measure_rate(process: "subprocess.Popen[str]", service_port: int, rate: float, seconds: float) -> bool:
    """Prints how the service bears `rate` calls a second; returns whether it answered them all."""
    load = Load(f"127.0.0.1:{service_port}", rate)
    used, begun = cpu_seconds(process), time.perf_counter()
    asyncio.run(load.run(seconds))
    cores = (cpu_seconds(process) - used) / (time.perf_counter() - begun)
    lost = int(rate * seconds) - len(load.seconds)
    print("| calls a second | answered | empty | lost | p50 ms | p90 ms | p99 ms | cores of the service |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    print(f"| {rate:g} | {len(load.seconds)} | {load.empty} | {lost} | {percentiles(load.seconds)} | {cores:.2f} |")
    return lost == 0 and load.empty == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000, help="calls for the overhead (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=500, help="calls a second to bear (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="length of each load (default: %(default)s)")
    parser.add_argument("--callers", type=int, default=32, help="callers for the most (default: %(default)s)")
    parser.add_argument("--cores", help="cores that all processes share, such as 0,1 (default: any)")
    parser.add_argument("--instant-model", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.instant_model:
        asyncio.run(serve_instantly())
        return
    if arguments.cores:
        os.sched_setaffinity(0, [int(core) for core in arguments.cores.split(",")])
    with started("benchmarks.front_service", "--instant-model") as (_, model_port):
        service = ("llm_functionalities", "--port", "0", "--endpoint", f"127.0.0.1:{model_port}")
        with started(*service) as (process, service_port):
            overhead = measure_overhead(model_port, service_port, arguments.calls)
            print(f"\noverhead at the median: {overhead:.2f} ms (allowed: {ALLOWED_OVERHEAD_MS:g} ms)\n")
            bore = measure_rate(process, service_port, arguments.rate, arguments.seconds)
            most = asyncio.run(most_calls(f"127.0.0.1:{service_port}", arguments.callers, arguments.seconds))
            print(f"\nmost, with {arguments.callers} callers one call after another: {most:.0f} calls/s")
    if overhead > ALLOWED_OVERHEAD_MS or not bore:
        sys.exit("the service is slower than it has to be")


if __name__ == "__main__":
    main()
