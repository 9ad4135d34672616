"""Measures what quantised weights and a KV cache in 8 bits cost: the perplexity of a model with them, and without.

    python -m benchmarks.perplexity tgi_server/demo_model/weights
    python -m benchmarks.perplexity MODEL --text a.txt b.txt --quantize int4 bitsandbytes-nf4
    python -m benchmarks.perplexity MODEL --text a.txt --quantize int4 --linear-kernels w4a16 w4a8
    python -m benchmarks.perplexity QUANTISED_MODEL --text a.txt --quantize none
    python -m benchmarks.perplexity tgi_server/demo_model/weights --quantize none --context 2000 \
        --kv-cache-dtype none fp8_e4m3fn fp8_e5m2

The demo model is asked about the answers in documents that it was not trained on, which --context puts one behind the
other into long prompts; with --text, any model about every token of some texts. Tokens go through the engine's own
path, as prompts whose logprobs are reported.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.report import finish, number, table, tell
from tgi_server import demo_model
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.config import DTYPES, KV_CACHE_DTYPES
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import EngineError

# Token ids, and which of them count.
TokenisedDocument = tuple[list[int], list[bool]]


def held_out_documents(tokenizer: Tokenizer, count: int) -> list[TokenisedDocument]:
    documents: list[TokenisedDocument] = []
    for line in demo_model.HELD_OUT.read_text(encoding="utf-8").splitlines()[:count]:
        texts = [encoding.ids for encoding in tokenizer.encode_batch(json.loads(line), add_special_tokens=False)]
        counts = [place % 2 == 1 for place, ids in enumerate(texts) for _ in ids]
        documents.append(([token for ids in texts for token in ids], counts))
    return documents


def joined(documents: Sequence[TokenisedDocument], context: int) -> list[TokenisedDocument]:
    """Puts documents one behind the other, as many as `context` tokens have room for; at least one."""
    pieces: list[TokenisedDocument] = []
    for ids, counts in documents:
        if pieces and len(pieces[-1][0]) + len(ids) <= context:
            pieces[-1] = (pieces[-1][0] + ids, pieces[-1][1] + counts)
        else:
            pieces.append((ids, counts))
    return pieces


def text_documents(tokenizer: Tokenizer, files: Sequence[Path], length: int) -> list[TokenisedDocument]:
    """Cuts the texts into pieces of at most `length` tokens."""
    texts = [tokenizer.encode(file.read_text(encoding="utf-8")).ids for file in files]
    pieces = [ids[start : start + length] for ids in texts for start in range(0, len(ids), length)]
    return [(piece, [True] * len(piece)) for piece in pieces]


def perplexity(engine: Engine, documents: Sequence[TokenisedDocument]) -> tuple[float, int]:
    """Returns the perplexity of the tokens that count, and their number. A document's first token does not count."""
    longest = max(len(ids) for ids, _ in documents)
    engine.warm_up(max_batch_size=1, max_prefill_tokens=longest, max_total_tokens=longest + 1)
    driver = Driver(engine)
    loss, tokens = 0.0, 0
    for index, (ids, counts) in enumerate(documents):
        report = ReportParameters(prefill_logprobs=True)
        (output,) = driver.run(RunningSequence(index, ids, StoppingParameters(1), report=report))
        (generation,) = output.generations
        assert generation.prompt_tokens is not None
        logprobs = generation.prompt_tokens.logprobs
        loss -= sum(logprob for logprob, counted in zip(logprobs[1:], counts[1:], strict=True) if counted)
        tokens += sum(counts[1:])
    return math.exp(loss / tokens), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="texts instead of the demo model's")
    parser.add_argument("--documents", type=int, default=300, help="held-out documents (default: %(default)s)")
    parser.add_argument("--context", type=int, default=0, help="tokens of documents put together (default: one each)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a piece of text (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--quantize",
        nargs="+",
        choices=("none", *ROUNDINGS),
        default=("none", *ROUNDINGS),
        metavar="WAY",
        help="values of --quantize, and none for the weights as they are (default: all)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=("none", *KV_CACHE_DTYPES),
        default=("none",),
        metavar="DTYPE",
        help="values of --kv-cache-dtype, and none for the dtype of the model (default: none)",
    )
    parser.add_argument(
        "--linear-kernels",
        nargs="+",
        default=("default",),
        help="values of --linear-kernels; default: those of the table",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    results: dict[str, tuple[float, int]] = {}
    try:
        tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
        if arguments.text:
            documents = text_documents(tokenizer, arguments.text, arguments.length)
        else:
            documents = joined(held_out_documents(tokenizer, arguments.documents), arguments.context)
    except OSError as error:
        sys.exit(f"error: {error}")
    for way, cached, named in product(arguments.quantize, arguments.kv_cache_dtype, arguments.linear_kernels):
        quantize, kv_cache_dtype = (None if requested == "none" else requested for requested in (way, cached))
        kernels = None if named == "default" else named
        dtype = DTYPES[arguments.dtype]
        try:
            config = EngineConfig(
                arguments.model, dtype, quantize=quantize, kv_cache_dtype=kv_cache_dtype, linear_kernels=kernels
            )
            engine = Engine(config)
        except EngineError as error:
            tell(f"{way}, KV cache {cached} is left out: {error}")
        else:
            weights = quantize or engine.info.quantization or arguments.dtype
            name = f"{weights}, {engine.info.linear_kernels}, KV cache {engine.info.kv_cache_dtype}"
            results[name] = perplexity(engine, documents)
    rows = [[numbers, f"{value:.4f}", number(tokens)] for numbers, (value, tokens) in results.items()]
    print(table(("numbers", "perplexity", "tokens"), rows))
    finish(results, arguments.output)


if __name__ == "__main__":
    main()
