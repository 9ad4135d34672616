"""Asks a service for its health all the time, from a process of its own, so that no other work of a test delays it.

`python -m tests.integration.llm_functionalities.health_watch HOST:PORT` prints a line once it is at it, goes on until
its standard input ends, and prints the longest wait then, in seconds.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.llm_functionalities.service import Service

LONGEST_HEALTH_SECONDS = 0.25
PAUSE_SECONDS = 0.005


@contextmanager
def health_is_quick(service: Service) -> Iterator[None]:
    """Fails when the service takes longer than a quarter of a second to say that it is well."""
    watch = subprocess.Popen(
        [sys.executable, "-m", __name__, service.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watch.stdin is not None
    assert watch.stdout is not None
    try:
        assert watch.stdout.readline() == "watching\n"
        yield
        watch.stdin.close()
        longest = float(watch.stdout.readline())
        assert longest < LONGEST_HEALTH_SECONDS, f"health took {longest:.3f} s"
    finally:
        watch.kill()
        watch.wait()


def main() -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        print("watching", flush=True)
        longest = 0.0
        while not over.wait(PAUSE_SECONDS):
            started = time.monotonic()
            stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            longest = max(longest, time.monotonic() - started)
    print(longest, flush=True)


if __name__ == "__main__":
    main()
