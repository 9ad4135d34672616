r"""Measures what quantised weights and a KV cache in 8 bits cost: the perplexity of a model with them, and without.

    python -m benchmarks.perplexity models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --table
    python -m benchmarks.perplexity MODEL --table --tokens 4000 --work /tmp/dense
    python -m benchmarks.perplexity tgi_server/demo_model/weights
    python -m benchmarks.perplexity MODEL --text a.txt b.txt --quantize int4 bitsandbytes-nf4
    python -m benchmarks.perplexity MODEL --text a.txt --quantize int4 --linear-kernels w4a16 w4a8
    python -m benchmarks.perplexity QUANTISED_MODEL --text a.txt --quantize none
    python -m benchmarks.perplexity tgi_server/demo_model/weights --quantize none --context 2000 \
        --kv-cache-dtype none fp8_e4m3fn fp8_e5m2

--table compares all variants of a model that the server can compute with its weights in float32, on the repository's
documents; copies of the model (dense, and by GPTQ) are written to the folder --work and used again. Otherwise the demo
model predicts the answers in documents that it was not trained on; --context joins documents to long prompts. With
--text, any model predicts every token of some texts. Tokens go through the engine's own path, as prompts whose logprobs
are reported.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.report import finish, number, table, tell
from tgi_server import demo_model
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.config import DTYPES, KV_CACHE_DTYPES
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import EngineError
from tgi_server.gguf.paths import SUFFIX
from tgi_server.model_files.gguf_models import described
from tgi_server.model_files.gptq_rounding import GptqSettings
from tgi_server.model_files.quantize import quantize_model

# Token ids, and which of them count.
TokenisedDocument = tuple[list[int], list[bool]]
DOCUMENTATION = Path(__file__).parents[1] / "docs"
TOKENS = 20_000
# Tokens of a piece of text.
LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to serve a model.

    copy: "given", the model as it is; "dense", its weights in float32; "gptq", these quantized. options: of the
    EngineConfig.
    """

    name: str
    copy: str = "dense"
    options: Mapping[str, Any] = field(default_factory=dict)


# The first one is what the others are compared with.
VARIANTS = (
    Variant("float32", options={"dtype": "float32"}),
    Variant("as it is, float32", "given", {"dtype": "float32"}),
    Variant("as it is, bfloat16", "given", {"dtype": "bfloat16"}),
    Variant("bfloat16", options={"dtype": "bfloat16"}),
    Variant("float16", options={"dtype": "float16"}),
    *(
        Variant(f"{name}, {dtype}", options={"dtype": dtype, "quantize": name})
        for name in ("int8", "fp8", "int4", "bitsandbytes-nf4")
        for dtype in ("float32", "bfloat16")
    ),
    Variant("GPTQ, bfloat16", "gptq", {"dtype": "bfloat16"}),
    *(
        Variant(f"as it is, bfloat16, KV cache {name}", "given", {"dtype": "bfloat16", "kv_cache_dtype": name})
        for name in KV_CACHE_DTYPES
    ),
)


def held_out_documents(tokenizer: Tokenizer, count: int) -> list[TokenisedDocument]:
    documents: list[TokenisedDocument] = []
    for line in demo_model.HELD_OUT.read_text(encoding="utf-8").splitlines()[:count]:
        texts = [encoding.ids for encoding in tokenizer.encode_batch(json.loads(line), add_special_tokens=False)]
        counts = [place % 2 == 1 for place, ids in enumerate(texts) for _ in ids]
        documents.append(([token for ids in texts for token in ids], counts))
    return documents


def joined(documents: Sequence[TokenisedDocument], context: int) -> list[TokenisedDocument]:
    """Joins documents to texts of at most `context` tokens, or of a single longer document."""
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


def documentation(folder: Path, tokens: int) -> list[TokenisedDocument]:
    """Returns pieces of the repository's documents, spread over all of them, of `tokens` tokens together at most.

    folder: of the model, whose tokenizer counts.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = text_documents(tokenizer, sorted(DOCUMENTATION.glob("*.md")), LENGTH)
    whole = [piece for piece in pieces if len(piece[0]) == LENGTH]
    count = min(len(whole), max(1, tokens // LENGTH))
    return [whole[index * len(whole) // count] for index in range(count)]


def perplexity(folder: Path, options: Mapping[str, Any], tokens: int = TOKENS) -> float:
    """Returns the perplexity of a model on the repository's documents.

    folder: of the model, or a GGUF file. options: of its EngineConfig; `dtype` is one of DTYPES. Raises EngineError.
    """
    folder = model_folder(folder)
    settings = dict(options) | ({"dtype": DTYPES[options["dtype"]]} if "dtype" in options else {})
    engine = Engine(EngineConfig(folder, **settings))
    return measured(engine, documentation(folder, tokens))[0]


def model_folder(model: Path) -> Path:
    """Returns the folder of a model, which is written for a GGUF file if it is not there yet."""
    return described(model) if model.suffix == SUFFIX else model


def dense_copy(folder: Path, target: Path) -> Path:
    """Writes a model with weights in float32 to another folder, unless it is there. Returns that."""
    if target.is_dir():
        return target
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    model = load_model(EngineConfig(folder, torch.float32), torch.device("cpu"))
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            tensors[f"{name.removesuffix('.own')}.weight"] = module.weight
    tied = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    save_file({name: tensors[name].contiguous() for name in tied.values()}, partial / "model.safetensors")
    for file in folder.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, partial)
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("quantization_config", None)
    (partial / "config.json").write_text(json.dumps(settings | {"dtype": "float32"}))
    partial.rename(target)
    return target


def gptq_copy(folder: Path, target: Path) -> Path:
    """Writes a dense model with weights of 4 bits by GPTQ to another folder, unless it is there. Returns that."""
    if not target.is_dir():
        settings, most = GptqSettings(), {"samples": 32, "length": 512}
        quantize_model(folder, target, settings, calibration=None, trust_remote_code=False, **most)
    return target


def compared(model: Path, work: Path, tokens: int, variants: Sequence[Variant] = VARIANTS) -> dict[str, float]:
    """Returns the perplexity of each variant of a model. work: a folder for its copies."""
    given = model_folder(model)
    name = model.stem if model.suffix == SUFFIX else model.name

    @cache
    def copy(kind: str) -> Path:
        if kind == "given":
            return given
        return (
            dense_copy(given, work / f"{name}-dense")
            if kind == "dense"
            else gptq_copy(copy("dense"), work / f"{name}-gptq")
        )

    results: dict[str, float] = {}
    for variant in variants:
        try:
            results[variant.name] = perplexity(copy(variant.copy), variant.options, tokens)
        except EngineError as error:
            tell(f"{variant.name} is left out: {error}")
        else:
            tell(f"{variant.name}: {results[variant.name]:.4f}")
    return results


def losses(results: Mapping[str, float]) -> str:
    """Returns a table of perplexities with what each is above the first one."""
    first = next(iter(results.values()))
    rows = [[name, f"{value:.4f}", f"{value / first - 1:+.2%}"] for name, value in results.items()]
    return table(("weights", "perplexity", "loss"), rows)


def measured(engine: Engine, documents: Sequence[TokenisedDocument]) -> tuple[float, int]:
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
    parser.add_argument("model", type=Path, help="a model folder, or with --table a GGUF file")
    parser.add_argument("--table", action="store_true", help="compare all variants of the model with float32")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of the table's texts (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table, beside the first one")
    parser.add_argument("--work", type=Path, default=Path("runs/perplexity"), help="default: %(default)s")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="texts instead of the demo model's")
    parser.add_argument("--documents", type=int, default=300, help="held-out documents (default: %(default)s)")
    parser.add_argument("--context", type=int, default=0, help="tokens of documents put together (default: one each)")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a piece of text (default: %(default)s)")
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
    if arguments.table:
        chosen = [each for each in VARIANTS if not arguments.only or each.name in (VARIANTS[0].name, *arguments.only)]
        compared_with = compared(arguments.model, arguments.work, arguments.tokens, chosen)
        print(losses(compared_with))
        finish(compared_with, arguments.output)
        return
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
            results[name] = measured(engine, documents)
    rows = [[numbers, f"{value:.4f}", number(tokens)] for numbers, (value, tokens) in results.items()]
    print(table(("numbers", "perplexity", "tokens"), rows))
    finish(results, arguments.output)


if __name__ == "__main__":
    main()
