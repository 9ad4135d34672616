"""Checks the health of a running service: `python -m llm_functionalities.healthcheck 127.0.0.1:8000 [readiness]`.

The exit code is 0 if it serves, and 1, after a line with the reason, if not.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 3


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m llm_functionalities.healthcheck HOST:PORT [SERVICE]")
    service = "".join(sys.argv[2:])
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            sys.exit(f"{sys.argv[1]} does not answer: {error.code().name}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"{sys.argv[1]} is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


if __name__ == "__main__":
    main()
