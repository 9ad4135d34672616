"""The gRPC service from Python: a call with a deadline, and a stream. usage: python grpc_service.py [HOST:PORT]

pip install grpcio-tools
"""

import sys
from pathlib import Path

import grpc

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8000"

# Compiles the contract while the program starts; `python -m grpc_tools.protoc` writes the same as files.
sys.path.append(str(Path(__file__).parents[1] / "proto"))
llm, services = grpc.protos_and_services("llm.proto")


def request(question: str) -> object:
    """Returns a request. timeout: in milliseconds."""
    return llm.ModelRequest(formatted_prompt=question, max_tokens=60, timeout=30_000)


with grpc.insecure_channel(ADDRESS) as channel:
    runner = services.LLMRunnerStub(channel)

    # Without a model the text is empty, and the metadata at the end give the reason.
    answer, call = runner.call_model.with_call(request("What can I use instead of butter?"))
    if answer.text:
        print(f"answer: {answer.text} ({answer.finish_reason}, {answer.generated_tokens} tokens)")
    else:
        print("no answer:", dict(call.trailing_metadata()).get("empty-reason"))

    print("stream: ", end="")
    for piece in runner.stream_model(request("How do I hang a picture?")):
        print(piece.text, end=f" ({piece.finish_reason})\n" if piece.finish_reason else "", flush=True)
