"""Measures short replies for many users over HTTP on a GPU: a server of a synthetic OPT-125m, 40 users, 10 tokens.

    python -m benchmarks.gpu_server
    python -m benchmarks.gpu_server --device cpu --repeat 2 --no-peer      tries the measurement itself

The peer is `generate_batch` of `transformers` on the same prompts, all users' at once, without HTTP. Prints a table,
and as the last line the same as JSON.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import uvloop
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.api import APIS
from benchmarks.connection import ServerUnavailable
from benchmarks.floor import Machine
from benchmarks.gpu import COLUMNS, row
from benchmarks.gpu_points import Point, peer_seconds
from benchmarks.linears import linear_shapes
from benchmarks.load import Server
from benchmarks.machine import measure_machine
from benchmarks.report import Summary, table
from benchmarks.serve import first_model, measure
from benchmarks.servers import OURS, ServerFailed, running
from benchmarks.synthetic import FOLDER, MODELS, write_model
from benchmarks.workloads import GREETING, WORKLOADS, Workload

MODEL = "opt-125m"
REQUESTS_PER_SECOND = 2000.0
START_SECONDS = 150.0


async def summary_of(model: Path, workload: Workload, log: Path) -> Summary:
    """Starts the server, sends the load, stops it. Raises ServerFailed, ServerUnavailable."""
    async with running(OURS, model, log, START_SECONDS) as server:
        api = APIS[OURS.api](await first_model(server.url, None))
        (summary,) = await measure(Server(server.url, api), [workload], seed=0, warm_up=True)
    return summary


def peer_rate(model: Path, workload: Workload, device: torch.device) -> float:
    """Requests/s."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
    loaded.generation_config.eos_token_id = None
    prompt = AutoTokenizer.from_pretrained(model)(GREETING)["input_ids"]
    return workload.users / peer_seconds(loaded, [prompt] * workload.users, workload.new_tokens)


def floor_rate(model: Path, workload: Workload, machine: Machine) -> float:
    """Requests/s, when all users' tokens are computed in the same passes."""
    cost = linear_shapes(model).cost(torch.bfloat16)
    return workload.users / cost.workload_seconds(machine, workload, fresh_tokens=1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="default: %(default)s")
    parser.add_argument("--repeat", type=int, default=200, help="requests of each user (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER / MODEL, help="the model; written if it is not there")
    parser.add_argument("--no-peer", action="store_true", help="leave generate_batch of transformers out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    if arguments.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; `--device cpu` tries the measurement itself")
    return arguments


def main() -> None:
    arguments = _arguments()
    if not (arguments.folder / "config.json").is_file():
        write_model(MODELS[MODEL](), arguments.folder)
    workload = replace(WORKLOADS["W1"], repeat=arguments.repeat)
    try:
        summary = uvloop.run(summary_of(arguments.folder, workload, Path("runs/logs/gpu-server.log")))
    except (ServerFailed, ServerUnavailable) as error:
        sys.exit(f"error: {error}")
    with torch.inference_mode():
        floor = floor_rate(arguments.folder, workload, measure_machine(arguments.device, torch.bfloat16))
    peer = None if arguments.no_peer else peer_rate(arguments.folder, workload, arguments.device)
    rate = summary.requests_per_s
    name = f"{MODEL} over HTTP, {workload.describe()}"
    point = Point(name, "requests/s", rate, peer, floor, rate, REQUESTS_PER_SECOND, lower=False)
    print(table(COLUMNS, [row(point)]))
    print(f"failures: {summary.failures}; load generator: {summary.client_cpu:.0%} of a core")
    result = json.dumps([asdict(point) | {"met": point.met, "failures": summary.failures}])
    print(result)
    if arguments.output:
        arguments.output.write_text(result + "\n")
    if summary.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
