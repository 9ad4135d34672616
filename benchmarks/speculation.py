"""Counts the tokens that a step yields, with drafts and without, and compares the speed.

    python -m benchmarks.speculation --chat --model models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --speculate 8
    python -m benchmarks.speculation
    python -m benchmarks.speculation --speculate 8
    python -m benchmarks.speculation --model MODEL --speculative-model DRAFT_MODEL

With --chat a trained chat model edits functions of this repository's benchmarks and summarises its documents with
quotes. Otherwise the assistant summarises steps of recipes, and rewrites them for replaced ingredients; the recipes are
those among the documents that the demo model was not trained on. Requests run one at a time in the engine alone, each
without drafts and then with them. Steps are counted; the speed, tokens per second with drafts divided by that without,
wants a quiet machine.
"""

import argparse
import ast
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.perplexity import DOCUMENTATION, model_folder
from benchmarks.report import finish_run, number, table
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
_COLUMNS = (
    *("workflow", "requests", "tokens", "steps", "steps with drafts", "tokens a step"),
    *("drafted", "accepted", "accepted share", "speed", "same tokens"),
)
# Of functions that are edited and of paragraphs that are quoted, in characters.
_EDITED, _QUOTED = (500, 1200), (500, 1500)
_EDIT = (
    "Add type hints where there are none and rename the variable `{name}` to `renamed_{name}`. Answer with the whole "
    "changed function in one code block and nothing else.\n\n```python\n{code}\n```"
)
_QUOTE = (
    "Summarise the following text in three points. Quote for each point the sentence of the text that it rests on, "
    "word for word.\n\n{text}"
)


@dataclass(frozen=True, slots=True)
class StepCount:
    """The steps that some requests took, and the tokens that they got."""

    tokens: int
    steps: int
    drafted: int
    accepted: int
    seconds: float
    texts: list[list[int]]


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


def chats(folder: Path, most: int) -> dict[str, list[str]]:
    """Returns prompts for a chat model, up to a number of each kind: code to edit, and texts to quote.

    folder: of the model, whose chat template is used.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def prompt(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return rendered

    edits = [prompt(_EDIT.format(name=name, code=code)) for name, code in _functions()]
    quotes = [prompt(_QUOTE.format(text=text)) for text in _paragraphs()]
    return {"edits of code": _spread(edits, most), "summaries with quotes": _spread(quotes, most)}


def _functions() -> Iterator[tuple[str, str]]:
    """Yields functions of the benchmarks, each after the name of a variable in it."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                code = ast.get_source_segment(source, node) or ""
                names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
                stored = [
                    each.id for each in ast.walk(node) if isinstance(each, ast.Name) and type(each.ctx) is ast.Store
                ]
                if stored and _EDITED[0] <= len(code) <= _EDITED[1]:
                    yield max(stored, key=names.count), code


def _paragraphs() -> Iterator[str]:
    for file in sorted(DOCUMENTATION.glob("*.md")):
        for text in file.read_text(encoding="utf-8").split("\n## "):
            prose = "\n\n".join(part for part in text.split("\n\n")[1:] if part[:1].isupper())
            if _QUOTED[0] <= len(prose) <= _QUOTED[1]:
                yield prose


def _spread(prompts: list[str], most: int) -> list[str]:
    return [prompts[index * len(prompts) // most] for index in range(min(most, len(prompts)))]


def compare(plain: Engine, drafting: Engine, requests: list[list[int]], new_tokens: int) -> tuple[StepCount, StepCount]:
    """Runs each request on both engines, one after the other."""
    drivers = (Driver(plain), Driver(drafting))
    steps, seconds = [0, 0], [0.0, 0.0]
    texts: list[list[list[int]]] = [[], []]
    for index, ids in enumerate(requests):
        for which, driver in enumerate(drivers):
            output = driver.add(RunningSequence(index, ids, StoppingParameters(new_tokens)))
            started = time.perf_counter()
            while driver.busy:
                steps[which] += bool(driver.step())
            seconds[which] += time.perf_counter() - started
            texts[which].append(output.tokens)
    before, after = (
        StepCount(sum(map(len, said)), count, driver.drafted, driver.accepted, spent, said)
        for said, count, driver, spent in zip(texts, steps, drivers, seconds, strict=True)
    )
    return before, after


def _engine(arguments: argparse.Namespace, folder: Path, longest: int, *, speculate: bool) -> Engine:
    config = EngineConfig(folder)
    if speculate:
        most = arguments.speculate or (0 if arguments.speculative_model else 4)
        config = EngineConfig(folder, speculate=most, speculative_model=arguments.speculative_model)
    engine = Engine(config)
    engine.warm_up(1, longest, longest + arguments.new_tokens)
    return engine


def _run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    folder = model_folder(arguments.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = chats(folder, arguments.requests) if arguments.chat else prompts(arguments.requests)
    asked = {
        name: [tokenizer.encode(each, add_special_tokens=not arguments.chat).ids for each in some]
        for name, some in texts.items()
    }
    longest = max(len(ids) for requests in asked.values() for ids in requests)
    plain, drafting = (_engine(arguments, folder, longest, speculate=each) for each in (False, True))
    results, rows = [], []
    for name, requests in asked.items():
        before, after = compare(plain, drafting, requests, arguments.new_tokens)
        per_step, speed = after.tokens / after.steps, before.seconds / after.seconds
        counts = (len(requests), after.tokens, before.steps, after.steps)
        share = f"{after.accepted / max(1, after.drafted):.0%}"
        ends = [number(per_step), str(after.drafted), str(after.accepted), share, f"{speed:.2f}"]
        rows.append([name, *map(str, counts), *ends, "yes" if before.texts == after.texts else "no"])
        results.append(
            {"workflow": name, "before": before, "after": after, "tokens_per_step": per_step, "speed": speed}
        )
    print(table(_COLUMNS, rows))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=demo_model.PATH, help="a folder with a tokenizer.json, or a GGUF file"
    )
    parser.add_argument("--chat", action="store_true", help="edits of code and summaries with quotes, for a chat model")
    parser.add_argument("--new-tokens", type=positive, default=NEW_TOKENS, help="of a request (default: %(default)s)")
    parser.add_argument(
        "--speculate", type=positive, help="maximum number of drafted tokens per step (default: as the server)"
    )
    parser.add_argument("--speculative-model", type=Path, help="the folder of what drafts (default: n-grams)")
    parser.add_argument("--requests", type=positive, default=40, help="of each workflow (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    finish_run(_run, arguments, EngineError)


if __name__ == "__main__":
    main()
