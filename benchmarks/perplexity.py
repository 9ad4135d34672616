"""Measures what 8-bit weights cost: the perplexity of a model with them, and without.

    python -m benchmarks.perplexity tgi_server/demo_model/weights
    python -m benchmarks.perplexity MODEL --text a.txt b.txt

The demo model is asked about the answers in documents of its corpus that it was not trained on; with --text, any model
about every token of some texts. Tokens go through the engine's own path, as prompts whose logprobs are reported.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.report import number, table
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.config import DTYPES
from tgi_server.engine.errors import EngineError
from tools.demo_model.corpus import Split
from tools.demo_model.packing import encoded

_BATCH_ID = 1
_SEED = 1
_TURNS = 6

Document = tuple[list[int], list[bool]]
"""Token ids, and which of them count."""


def demo_documents(tokenizer: Tokenizer, count: int) -> list[Document]:
    return list(islice(encoded(tokenizer, _SEED, Split.HELD_OUT, _TURNS), count))


def text_documents(tokenizer: Tokenizer, files: Sequence[Path], length: int) -> Iterator[Document]:
    """Pieces of at most `length` tokens."""
    for file in files:
        ids = tokenizer.encode(file.read_text(encoding="utf-8")).ids
        for start in range(0, len(ids), length):
            piece = ids[start : start + length]
            yield piece, [True] * len(piece)


def perplexity(engine: Engine, documents: Sequence[Document]) -> tuple[float, int]:
    """Of the tokens that count, and how many they are. The first of a document is known, so it does not."""
    longest = max(len(ids) for ids, _ in documents)
    capacity = engine.warm_up(max_batch_size=1, max_prefill_tokens=longest, max_total_tokens=longest + 1)
    blocks = list(range(1, 2 + longest // capacity.block_size)) if engine.info.paged else []
    loss, tokens = 0.0, 0
    for index, (ids, counts) in enumerate(documents):
        report = ReportParameters(prefill_logprobs=True)
        prompt = RunningSequence(index, ids, StoppingParameters(1), report=report, blocks=blocks)
        (generation,) = engine.step(_BATCH_ID, [prompt], [(index, len(ids))]).collect().generations
        assert generation.prompt_tokens is not None
        logprobs = generation.prompt_tokens.logprobs
        loss -= sum(logprob for logprob, counted in zip(logprobs[1:], counts[1:], strict=True) if counted)
        tokens += sum(counts[1:])
    return math.exp(loss / tokens), tokens


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="texts to score instead of the demo corpus"
    )
    parser.add_argument("--documents", type=int, default=300, help="of the demo corpus (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a piece of text (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    documents = (
        list(text_documents(tokenizer, arguments.text, arguments.length))
        if arguments.text
        else demo_documents(tokenizer, arguments.documents)
    )
    results: list[dict[str, object]] = []
    for quantize in (None, "int8"):
        engine = Engine(EngineConfig(arguments.model, dtype=DTYPES[arguments.dtype], quantize=quantize))
        value, tokens = perplexity(engine, documents)
        results.append({"weights": quantize or arguments.dtype, "perplexity": value, "tokens": tokens})
    rows = [[str(each["weights"]), f"{each['perplexity']:.4f}", number(float(str(each["tokens"])))] for each in results]
    print(table(("weights", "perplexity", "tokens"), rows))
    return results


def main() -> None:
    try:
        print(json.dumps(_run(_arguments())))
    except (EngineError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
