"""Trains the demo model from nothing and writes it into the package.

Everything follows from the seed: the corpus, the tokenizer, the first weights and the order of the documents.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tgi_server import demo_model
from tools.demo_model import copying
from tools.demo_model.layout import BOS, EOS, PAD
from tools.demo_model.packing import batches
from tools.demo_model.tokenizer import VOCABULARY, train_tokenizer

CONTEXT = 2048
TOKENS_PER_STEP = 4096
SHORT_ROW = 512
LONG_SHARE = 0.12
SHORT_TURNS, LONG_TURNS = 6, 40
PEAK_RATE, LAST_RATE, WARM_UP = 3e-3, 5e-5, 60
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def configuration(tokenizer: Tokenizer) -> LlamaConfig:
    """A Llama of 3.5 million parameters whose heads divide among two or four ranks."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def rate(step: int, steps: int) -> float:
    """The learning rate: a linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def curriculum(tokenizer: Tokenizer, seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Short rows first; at the end rows as long as the context, with conversations that fill them."""
    long_steps = round(steps * LONG_SHARE)
    short = batches(tokenizer, seed, SHORT_TURNS, TOKENS_PER_STEP // SHORT_ROW, SHORT_ROW)
    yield from islice(short, steps - long_steps)
    yield from islice(batches(tokenizer, seed + 1, LONG_TURNS, TOKENS_PER_STEP // CONTEXT, CONTEXT), long_steps)


def optimiser(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.97))


def train(tokenizer: Tokenizer, seed: int, steps: int) -> LlamaForCausalLM:
    """Trains for `steps` steps of `TOKENS_PER_STEP` tokens; prints the loss, in nats per token, as it falls."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(configuration(tokenizer))
    copying.install(model, torch.Generator().manual_seed(seed))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    adam = optimiser(model)
    start, seen = time.monotonic(), 0.0
    for step, (inputs, targets, learned) in enumerate(curriculum(tokenizer, seed, steps)):
        for group in adam.param_groups:
            group["lr"] = rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[learned])
        loss = functional.cross_entropy(logits.float(), targets[learned])
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        seen = loss.item() if step == 0 else 0.98 * seen + 0.02 * loss.item()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1}/{steps}  loss {seen:.3f}  {time.monotonic() - start:.0f} s", flush=True)
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the model in bfloat16 with all that `transformers` wants beside it; replaces what the folder holds."""
    shutil.rmtree(folder, ignore_errors=True)
    ids = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id,
           "pad_token_id": model.config.pad_token_id}  # fmt: skip
    model.generation_config = GenerationConfig(**ids)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    shutil.copyfile(_TEMPLATE, folder / "chat_template.jinja")
    for path in folder.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"wrote {folder}: {size / 1e6:.2f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=2400, help="optimiser steps of 4,096 tokens (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=demo_model.PATH, help="folder to write (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer(options.seed)
    save(train(tokenizer, options.seed, options.steps), tokenizer, options.output)


if __name__ == "__main__":
    main()
