"""Counts the tokens that a step yields in workflows of llm_functionalities, with drafts and without.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --speculate 8
    python -m benchmarks.speculation --model MODEL --speculative-model DRAFT_MODEL

The assistant summarises steps of recipes, and rewrites them for replaced ingredients; the recipes are those among the
documents that the demo model was not trained on. Requests run one at a time in the engine alone, and their steps are
counted, so that the machine's speed matters only in so far as it says how many drafted tokens are worth a step's time.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.report import finish, number, table
from benchmarks.workloads import positive
from llm_functionalities.services.workflows import summary
from llm_functionalities.services.workflows.rewriting import Replacement, rewriting
from shared.stubs import llm_pb2
from tgi_server import demo_model
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import EngineError

NEW_TOKENS = 128
_RECIPE = re.compile(r"^\n?(?P<title>[^\n]+?)(?: for [a-z]+ people)?:\n(?P<steps>(?:\d+\. [^\n]+\n?){3,})")
# Ingredients that many of the recipes have, and what stands in for them.
_REPLACED = {"butter": "margarine", "cream": "yoghurt", "milk": "oat milk", "onions": "leeks", "carrots": "parsnips"}
_COLUMNS = ("workflow", "requests", "tokens", "steps", "steps with drafts", "tokens a step", "drafted", "accepted")


@dataclass(frozen=True, slots=True)
class StepCount:
    """The steps that some requests took, and the tokens that they got."""

    tokens: int
    steps: int
    drafted: int
    accepted: int


def recipes() -> Iterator[tuple[str, list[str]]]:
    """Yields titles and steps of recipes."""
    for line in demo_model.HELD_OUT.read_text(encoding="utf-8").splitlines():
        for text in json.loads(line)[1::2]:
            if found := _RECIPE.match(text.removesuffix("<|eos|>")):
                yield found["title"], [step.partition(". ")[2] for step in found["steps"].splitlines()]


def prompts(most: int) -> dict[str, list[str]]:
    """Returns prompts of each workflow, up to a number."""
    summaries, rewritings = [], []
    for title, steps in recipes():
        summaries += [summary.prompt(title, step, after) for step, after in zip(steps, [*steps[1:], ""], strict=True)]
        for step in steps:
            pairs = [
                llm_pb2.ReplacedIngredient(
                    original=llm_pb2.Ingredient(name=old), replacement=llm_pb2.Ingredient(name=new)
                )
                for old, new in _REPLACED.items()
            ]
            rewritings.append(rewriting(title, step, [Replacement(pair) for pair in pairs]).prompt)
    return {
        "summary": [prompt for prompt in summaries if prompt][:most],
        "step rewriting": [prompt for prompt in rewritings if prompt][:most],
    }


def count(engine: Engine, requests: list[list[int]]) -> StepCount:
    driver = Driver(engine)
    steps = tokens = 0
    for index, ids in enumerate(requests):
        output = driver.add(RunningSequence(index, ids, StoppingParameters(NEW_TOKENS)))
        while driver.busy:
            steps += bool(driver.step())
        tokens += len(output.tokens)
    return StepCount(tokens, steps, driver.drafted, driver.accepted)


def _engine(arguments: argparse.Namespace, longest: int, *, speculate: bool) -> Engine:
    config = EngineConfig(arguments.model)
    if speculate:
        most = arguments.speculate or (0 if arguments.speculative_model else 4)
        config = EngineConfig(arguments.model, speculate=most, speculative_model=arguments.speculative_model)
    engine = Engine(config)
    engine.warm_up(1, longest, longest + NEW_TOKENS)
    return engine


def _run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    asked = {name: [tokenizer.encode(each).ids for each in some] for name, some in prompts(arguments.requests).items()}
    longest = max(len(ids) for requests in asked.values() for ids in requests)
    plain, drafting = (_engine(arguments, longest, speculate=each) for each in (False, True))
    results, rows = [], []
    for name, requests in asked.items():
        before, after = count(plain, requests), count(drafting, requests)
        per_step = after.tokens / after.steps
        counts = (len(requests), after.tokens, before.steps, after.steps)
        rows.append([name, *map(str, counts), number(per_step), str(after.drafted), str(after.accepted)])
        results.append({"workflow": name, "before": before, "after": after, "tokens_per_step": per_step})
    print(table(_COLUMNS, rows))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model.PATH, help="a folder with a tokenizer.json")
    parser.add_argument("--speculate", type=positive, help="drafted tokens of a step at most (default: as the server)")
    parser.add_argument("--speculative-model", type=Path, help="the folder of what drafts (default: n-grams)")
    parser.add_argument("--requests", type=positive, default=40, help="of each workflow (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    try:
        finish(_run(arguments), arguments.output)
    except EngineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
