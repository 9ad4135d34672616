"""Measures embeddings: the engine beside sentence-transformers and ONNX Runtime, in the shape of bge-small.

    python -m benchmarks.encoders
    python -m benchmarks.encoders --texts 256 --rounds 5

Texts have lengths as passages do (log-normal, 60 words in the median, 510 at most), and weights are random. The others
are measured where they are installed (`pip install sentence-transformers onnxruntime onnx`). All run in turns, with one
thread, and CPU time counts, so that other programs on the machine matter little.
"""

import argparse
import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel

from benchmarks.report import finish, number, table, tell
from benchmarks.workloads import positive
from tgi_server.engine import EngineConfig
from tgi_server.engine.encoders import Encoder

WORDS = 30_000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
# Tokens of a batch, as in a server of an embedding model alone.
BATCH_TOKENS = 4_096

Embed = Callable[[Sequence[str]], Tensor]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    ids: Sequence[int]
    second: int = 0


def make_model(folder: Path) -> None:
    """Writes a model in the shape of bge-small, whose tokenizer takes each word as a token."""
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=30_522, max_position_embeddings=512, **shape)).save_pretrained(folder)
    words = {word: place for place, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "pad_token": "[PAD]"}
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    for file, content in (
        (folder / "tokenizer_config.json", settings),
        (folder / "modules.json", listed),
        (pooling / "config.json", {"word_embedding_dimension": 384, "pooling_mode_cls_token": True}),
    ):
        file.write_text(json.dumps(content))


def make_texts(count: int) -> list[str]:
    generator = random.Random(1)
    lengths = [min(510, max(4, int(generator.lognormvariate(4.1, 0.8)))) for _ in range(count)]
    return [" ".join(f"w{generator.randrange(WORDS)}" for _ in range(length)) for length in lengths]


def engine_embeds(folder: Path, *, custom_kernels: bool = True) -> Embed:
    encoder = Encoder("embed", EngineConfig(folder, device=torch.device("cpu"), custom_kernels=custom_kernels))
    return _in_batches(folder, encoder, lambda batch: encoder.encode(batch))


def onnx_embeds(folder: Path) -> Embed:
    """Returns embeddings by ONNX Runtime, in the engine's batches."""
    import onnxruntime

    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()

    class Cls(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]

    file, example = folder / "model.onnx", torch.ones(2, 8, dtype=torch.int64)
    axes = {name: {0: "texts", 1: "tokens"} for name in ("ids", "mask")}
    torch.onnx.export(
        Cls(), (example, example), str(file), input_names=["ids", "mask"], dynamic_axes=axes, dynamo=False
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def encode(batch: Sequence[TokenizedText]) -> Tensor:
        lengths = torch.tensor([len(text.ids) for text in batch])
        longest = int(lengths.max())
        ids = torch.tensor([[*text.ids, *[0] * (longest - len(text.ids))] for text in batch])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        return torch.from_numpy(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])

    return _in_batches(folder, Encoder("embed", EngineConfig(folder, device=torch.device("cpu"))), encode)


def sentence_transformers_embeds(folder: Path) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: torch.from_numpy(model.encode(list(texts), batch_size=32, show_progress_bar=False))


def _in_batches(folder: Path, encoder: Encoder, encode: Callable[[Sequence[TokenizedText]], Tensor]) -> Embed:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def embed(texts: Sequence[str]) -> Tensor:
        tokenized = [TokenizedText(each.ids) for each in tokenizer.encode_batch_fast(list(texts))]
        values = torch.empty(len(texts), encoder.info.columns)
        for batch in encoder.batches(tokenized, BATCH_TOKENS):
            values[batch] = encode([tokenized[each] for each in batch])
        return normalize(values, dim=1)

    return embed


def measured(ways: dict[str, Embed], texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Returns CPU seconds of the best round, and the largest difference from the first way's values."""
    first = next(iter(ways.values()))(texts)
    results = {name: {"cpu_s": float("inf"), "difference": 0.0} for name in ways}
    for number_ in range(rounds + 1):
        for name, embed in ways.items():
            began = time.process_time()
            values = embed(texts)
            taken = time.process_time() - began
            results[name]["difference"] = float((values - first).abs().max())
            if number_:  # the first round is not counted
                results[name]["cpu_s"] = min(results[name]["cpu_s"], taken)
        tell(f"round {number_} of {rounds}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=positive, default=64, help="texts to embed; default: 64")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds; the best one counts; default: 3")
    parser.add_argument("--output", type=Path, help="write the numbers to this file, too, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = make_texts(arguments.texts)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder)
        ways = {"engine": engine_embeds(folder), "engine, torch's layers": engine_embeds(folder, custom_kernels=False)}
        for package, make in (
            ("sentence_transformers", sentence_transformers_embeds),
            ("onnxruntime", onnx_embeds),
        ):
            if importlib.util.find_spec(package) is None:
                tell(f"{package} is left out: it is not installed")
            else:
                ways[package] = make(folder)
        results = measured(ways, texts, arguments.rounds)
    tokens = sum(len(text.split()) + 2 for text in texts)
    rows = [[name, number(tokens / each["cpu_s"]), f"{each['difference']:.1e}"] for name, each in results.items()]
    print(table(("embeddings by", "tokens a CPU second", "difference"), rows))
    finish({"tokens": tokens, "texts": len(texts), **results}, arguments.output)


if __name__ == "__main__":
    main()
