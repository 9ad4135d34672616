"""llama.cpp's own server, from the prebuilt package `xllamacpp`, as something to compare with.

    python -m benchmarks.llama_cpp_server model.gguf 8080
    python -m benchmarks.llama_cpp_server model.gguf 8080 --parallel 8 --context 20480

Runs in an environment of its own, `pip install xllamacpp` (README.md). The server keeps its own defaults, except the
number of slots, the tokens of each, and the threads.
"""

import argparse
import os
import signal
from pathlib import Path

from xllamacpp import CommonParams, Server


def parameters(arguments: argparse.Namespace) -> CommonParams:
    params = CommonParams()
    params.model.path = str(arguments.model)
    params.port = arguments.port
    params.n_parallel = arguments.parallel
    params.n_ctx = arguments.parallel * arguments.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("port", type=int)
    parser.add_argument("--parallel", type=int, default=32, help="slots: requests at once (default: %(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a slot (default: %(default)s)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="default: all cores, %(default)s")
    server = Server(parameters(parser.parse_args()))  # the server runs while this object lives
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
