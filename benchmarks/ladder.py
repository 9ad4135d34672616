"""Measures the ladder of llm_functionalities: calls in bursts, with deadlines, to a large and a small model.

    python -m benchmarks.ladder --large FOLDER --small FOLDER --large-cores 0 --small-cores 1

Starts a server for each model, unless it is given as the URL of one that runs, and the service in front of them. The
deadlines are multiples of the time that the large model takes for one call alone. The oracle knows how long each answer
is, and what prompts and steps of the large model take (measured first). It gives the large model each call for which
all that it has are in time. By the same rule it says how many calls the small model alone would answer: where that is
not all, no ladder can.
"""

import argparse
import asyncio
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc

from benchmarks.front_service import started
from benchmarks.report import finish, percentile, table, tell
from benchmarks.servers import OURS, ServerDidNotStart, running
from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.fakes.simulated_models import Call, Model, oracle

# Users of the closed loops that a model's steps are measured with, and how long each loop lasts.
USERS, LOOP_SECONDS = (1, 4, 8), 3.0
PROMPTS = (10, 60)
# Begins the prompts of this run, which no prefix cache knows from another one.
RUN = time.time_ns() % 1_000_000
# Of the time that the large model takes for the mean answer alone.
DEADLINES = (1.0, 2.0, 4.0, 8.0)
BURSTS = (1, 1, 1, 2, 4, 10)
WORDS = ("a lighthouse", "a baker", "the night train", "the sea in winter", "an old friend", "two brothers", "a letter")


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call. seconds: its duration. model: the model that answered, or ""."""

    model: str
    seconds: float
    tokens: int
    in_time: bool


def prompt(number: int, words: int) -> str:
    """Returns a prompt without a common prefix with others, whose answer is long."""
    draw = random.Random(number)
    return f"Story {RUN}/{number}: " + ", ".join(draw.choice(WORDS) for _ in range(words // 3)) + ". Once upon a time"


async def call(
    stub: llm_pb2_grpc.LLMRunnerStub, number: int, words: int, tokens: int, models: str, wait: float
) -> CallOutcome:
    request = llm_pb2.ModelRequest(formatted_prompt=prompt(number, words), max_tokens=tokens, timeout=int(1000 * wait))
    begun = time.perf_counter()
    rpc = stub.call_model(request, metadata=(("models", models),))
    response = await rpc
    seconds = time.perf_counter() - begun
    model = dict(await rpc.trailing_metadata()).get("model", "")
    return CallOutcome(model, seconds, response.generated_tokens, bool(response.text) and seconds <= wait + 0.01)


@dataclass(frozen=True)
class Cost:
    """Seconds that a model takes. prompt: for one without words; word: more for each word of it; step: for a token of
    all answers in progress; row: more for each of them."""

    prompt: float
    word: float
    step: float
    row: float

    def of_prompt(self, words: int) -> float:
        return self.prompt + self.word * words


async def measured(stub: llm_pb2_grpc.LLMRunnerStub, model: str) -> Cost:
    """Measures prompts alone, then closed loops of several users, and draws a line through the steps of these."""
    prompts = []
    for words in PROMPTS:
        took = [(await call(stub, -number, words, 1, model, 60.0)).seconds for number in range(4)]
        prompts.append((words, percentile(took, 50) or 0.0))
    word, prompt_seconds = _line(prompts)
    points = []
    for users in USERS:
        per_token: list[float] = []

        async def user(place: int, users: int = users, per_token: list[float] = per_token) -> None:
            until, number = time.perf_counter() + LOOP_SECONDS, place * 1000
            while time.perf_counter() < until:
                number += 1
                outcome = await call(stub, -number, 20, 24, model, 60.0)
                # While one answer is written, each user's prompt is computed once.
                prompts = users * (prompt_seconds + 20 * word)
                per_token.append(max(0.0, outcome.seconds - prompts) / max(1, outcome.tokens - 1))

        await asyncio.gather(*(user(place) for place in range(users)))
        points.append((users, percentile(per_token, 50) or 0.0))
    row, step = _line(points)
    cost = Cost(prompt_seconds, word, step, row)
    prompts_ms = ", ".join(f"{1000 * cost.of_prompt(words):.0f}" for words in PROMPTS)
    steps_ms = ", ".join(f"{1000 * seconds:.1f}" for _, seconds in points)
    tell(f"{model}: prompts of {PROMPTS} words {prompts_ms} ms; a token with {USERS} at a time {steps_ms} ms")
    return cost


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the slope and the height at 0 of the line through points, neither below 0."""
    mean_x, mean_y = (sum(each[axis] for each in points) / len(points) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    return slope, max(0.0, mean_y - slope * mean_x)


def bursts(seed: int, count: int, sizes: Sequence[int], unit: float, load: float) -> list[Call]:
    """Returns calls in bursts.

    sizes: limits of answers, in tokens. unit: seconds of a mean call alone. load: mean number of calls that begin
    within it.
    """
    draw, now = random.Random(seed), 0.0
    calls: list[Call] = []
    gap = unit * sum(BURSTS) / len(BURSTS) / load
    while len(calls) < count:
        now += draw.expovariate(1 / gap)
        for _ in range(draw.choice(BURSTS)):
            tokens, words = draw.choice(sizes), draw.randint(10, 60)
            calls.append(
                Call(0, now + 0.1 * unit * draw.random(), unit * draw.choice(DEADLINES), words, tokens, tokens)
            )
    calls.sort(key=lambda each: each.at)
    return [replace(each, number=number) for number, each in enumerate(calls[:count])]


def best(cost: Cost, calls: Sequence[Call], places: int) -> int:
    """Returns how many calls the oracle has the large model answer. The first token of an answer takes the prompt."""
    microseconds = [1e6 * max(0.0, cost.of_prompt(each.characters) - cost.step - cost.row) for each in calls]
    known = [replace(each, characters=round(took)) for each, took in zip(calls, microseconds, strict=True)]
    return oracle(Model(cost.step, cost.row, 1e-6, places), known)


async def measure(stub: llm_pb2_grpc.LLMRunnerStub, calls: Sequence[Call], models: str) -> list[CallOutcome]:
    """Makes each call at its time, whatever becomes of those before it."""
    begun, made = time.perf_counter(), []
    for each in calls:
        await asyncio.sleep(max(0.0, begun + each.at - time.perf_counter()))
        made.append(
            asyncio.create_task(call(stub, each.number, each.characters, each.max_tokens, models, each.seconds))
        )
    return await asyncio.gather(*made)


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    async with AsyncExitStack() as stack:
        urls = []
        for name, model, cores in (
            ("large", arguments.large, arguments.large_cores),
            ("small", arguments.small, arguments.small_cores),
        ):
            if str(model).startswith("http"):
                urls.append(str(model))
                continue
            pinned = f"taskset -c {shlex.quote(cores)} " if cores else ""
            ours = replace(OURS, command=f"{pinned}{OURS.command} {arguments.server_flags}")
            log = Path(f"runs/logs/ladder-{name}.log")
            urls.append((await stack.enter_async_context(running(ours, Path(model), log, arguments.start_limit))).url)
        named = f"large={urls[0]},small={urls[1]}"
        _, port = stack.enter_context(started("llm_functionalities", "--port", "0", "--ladder-models", named))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        cost = await measured(stub, "large")
        small_cost = await measured(stub, "small")
        unit = cost.of_prompt(35) + (cost.step + cost.row) * (sum(arguments.tokens) / len(arguments.tokens) - 1)
        calls = bursts(arguments.seed, arguments.calls, arguments.tokens, unit, arguments.load)
        calls = [each for each in calls if each.at < arguments.seconds]
        tell(f"{len(calls)} calls in {calls[-1].at:.0f} s; one alone takes {unit:.2f} s by the large model")
        outcomes = await measure(stub, calls, "large,small")
    lengths = {
        size: [each.tokens for each, made in zip(outcomes, calls, strict=True) if made.max_tokens == size]
        for size in arguments.tokens
    }
    possible = best(cost, calls, arguments.places)
    models = Counter(each.model for each in outcomes if each.in_time)
    result = {
        "calls": len(calls),
        "in time": sum(models.values()),
        "by the small model alone": best(small_cost, calls, arguments.places),
        "by the large model": models["large"],
        "by the oracle": possible,
        "share of the oracle": round(models["large"] / possible, 3),
        "not in time": Counter(each.model or "no answer" for each in outcomes if not each.in_time),
        "mean tokens": {size: round(sum(each) / max(1, len(each)), 1) for size, each in lengths.items()},
    }
    print(table(list(result), [[str(value) for value in result.values()]]))
    return result | {"cost": asdict(cost), "outcomes": [asdict(each) for each in outcomes]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--large", "--small"):
        parser.add_argument(name, required=True, metavar="MODEL", help="a model folder, a GGUF file, or a server's URL")
    parser.add_argument("--large-cores", default="", metavar="LIST", help="such as 0,1 (default: any)")
    parser.add_argument("--small-cores", default="", metavar="LIST", help="such as 2,3 (default: any)")
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="for both servers")
    parser.add_argument("--start-limit", type=float, default=600, help="seconds for a start (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8, 16, 32], help="limits of answers (default: %(default)s)"
    )
    parser.add_argument("--calls", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600, help="in which calls begin (default: %(default)s)")
    parser.add_argument(
        "--load", type=float, default=3.0, help="calls begun in the time of one alone (default: %(default)s)"
    )
    parser.add_argument("--places", type=int, default=128, help="answers in a batch, at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the bursts (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    try:
        finish(asyncio.run(run(arguments)), arguments.output)
    except ServerDidNotStart as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
