"""Trains a small Llama on the sources of Python's standard library, to measure what quantised weights cost.

    python -m benchmarks.trained
    python -m benchmarks.perplexity runs/trained/llama-512 --text runs/trained/llama-512/held_out.txt
    python -m benchmarks.trained --from-gguf model.gguf --folder runs/trained/model

The last one trains nothing: it writes the model of a GGUF file as a folder of `transformers` with weights in bfloat16,
for servers that do not read such files.

Random weights will not do for that: a perplexity says something only of a model that has learned. Every twentieth file
is left out of the training and its beginning goes to held_out.txt; calibration.txt, for GPTQ, is of the others.
"""

import argparse
import shutil
import sysconfig
import time
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import tell
from benchmarks.workloads import positive
from tgi_server.engine.checkpoint.quantized.gguf_tensors import gguf_tensors
from tgi_server.gguf.file import read_gguf
from tgi_server.gguf.paths import SUFFIX
from tgi_server.model_files.gguf_models import described

FOLDER = Path("runs/trained/llama-512")
_LENGTH = 256
# Characters of each file.
_HELD_OUT, _CALIBRATION = 1_500, 600
_BEGIN, _END = "<s>", "</s>"
_WARM_UP_STEPS = 20


def sources() -> tuple[list[str], list[str]]:
    """Returns the sources to train with, and those that are held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    training: list[str] = []
    held_out: list[str] = []
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder)
        if not {"site-packages", "dist-packages", "test", "tests"}.intersection(name.parts):
            text = file.read_text(encoding="utf-8", errors="replace")
            (training if crc32(str(name).encode()) % 20 else held_out).append(text)
    return training, held_out


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [_BEGIN, _END]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(model: LlamaForCausalLM, tokens: Tensor, steps: int, batch: int) -> None:
    """tokens: [tokens] int64, of which every step takes `batch` pieces."""
    optimiser = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimiser, lambda step: min((step + 1) / _WARM_UP_STEPS, (steps - step) / steps))
    started, losses = time.perf_counter(), 0.0
    for step in range(steps):
        starts = torch.randint(len(tokens) - _LENGTH, (batch, 1))
        pieces = tokens[starts + torch.arange(_LENGTH)]
        loss = model(input_ids=pieces, labels=pieces).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses += loss.item()
        if (step + 1) % 20 == 0:
            tell(f"step {step + 1} of {steps}: loss {losses / 20:.3f}, {time.perf_counter() - started:.0f} s")
            losses = 0.0


def convert(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder of `transformers`: weights in bfloat16, and the file's tokenizer."""
    shutil.copytree(described(file), folder, ignore=shutil.ignore_patterns(f"*{SUFFIX}"), dirs_exist_ok=True)
    tensors = gguf_tensors(read_gguf(file)).items()
    numbers = {name: tensor[...].to(torch.bfloat16).contiguous() for name, tensor in tensors}
    save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: %(default)s)")
    parser.add_argument("--hidden", type=positive, default=512, help="hidden size (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=positive, default=4096, help="default: %(default)s")
    parser.add_argument("--steps", type=positive, default=1100, help="default: %(default)s")
    parser.add_argument("--batch", type=positive, default=4, help=f"pieces of {_LENGTH} tokens (default: %(default)s)")
    parser.add_argument("--from-gguf", type=Path, metavar="FILE", help="convert this file to --folder; train nothing")
    arguments = parser.parse_args()
    if arguments.from_gguf is not None:
        convert(arguments.from_gguf, arguments.folder)
        return
    torch.manual_seed(0)
    training, held_out = sources()
    tokenizer = train_tokenizer(training, arguments.vocabulary)
    tokens = torch.tensor([token for encoding in tokenizer.encode_batch(training) for token in encoding.ids])
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        intermediate_size=arguments.hidden * 11 // 4,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    tell(f"{model.num_parameters() / 1e6:.1f}M parameters, {len(tokens) / 1e6:.1f}M tokens of {len(training)} files")
    train(model, tokens, arguments.steps, arguments.batch)
    model.to(torch.bfloat16).save_pretrained(arguments.folder)
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    (arguments.folder / "held_out.txt").write_text("".join(text[:_HELD_OUT] for text in held_out))
    (arguments.folder / "calibration.txt").write_text("".join(text[:_CALIBRATION] for text in training))


if __name__ == "__main__":
    main()
