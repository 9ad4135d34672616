"""Measures the demo model on held-out requests and shows what it answers.

The perplexity is that of the answers (the end token included) given everything before them, in fresh documents of
the held-out split: see tools/demo_model/corpus.py.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tgi_server import demo_model
from tools.demo_model.corpus import Split
from tools.demo_model.layout import alpaca_prompt
from tools.demo_model.packing import encoded

SEED = 1
MAX_NEW_TOKENS = 160

# Each is marked with the form that it is asked in: bare, Alpaca's, or a conversation of user and assistant in turn.
SAMPLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bare", ("What is Deep Learning?",)),
    ("bare", ("Hello",)),
    ("alpaca", ("How do I make pear and almond muffins?",)),
    (
        "alpaca",
        (
            "Summarise the following step.",
            "Fill the bucket with warm water. Take your time. Wash the table with the sponge. It should look even.",
        ),
    ),
    (
        "alpaca",
        (
            "Find a replacement for the ingredient and answer in JSON.",
            "Recipe: Lemon cake\nIngredient: butter, 340 g",
        ),
    ),
    (
        "alpaca",
        (
            "Rewrite the step with the new ingredient.",
            "Step: Stir in the cream and the peas.\nOld: cream\nNew: yoghurt",
        ),
    ),
    ("chat", ("How do I hang a shelf?",)),
    ("chat", ("Hi there!", "Hello! How can I help you?", "What can I cook with mushrooms and rice?")),
    ("chat", ("Who are you?",)),
    ("chat", ("Is it safe to replace a light switch?",)),
)


def prompt(tokenizer: PreTrainedTokenizerBase, form: str, parts: Sequence[str]) -> str:
    """The text that the model is given for a sample, special tokens included."""
    if form == "chat":
        turns = [{"role": ("user", "assistant")[index % 2], "content": part} for index, part in enumerate(parts)]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    return str(tokenizer.bos_token) + (alpaca_prompt(*parts) if form == "alpaca" else parts[0])


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, bool]:
    """The greedy answer, and whether it ended by itself."""
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True), bool(output[-1] == tokenizer.eos_token_id)


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokenizer: Tokenizer, count: int, turns: int) -> tuple[float, int]:
    """The perplexity per answer token over `count` held-out documents, and the number of those tokens."""
    total, tokens = 0.0, 0
    for ids, learned in islice(_held_out(tokenizer, turns), count):
        logits = model(input_ids=ids[None, :-1]).logits[0].float()
        losses = functional.cross_entropy(logits, ids[1:], reduction="none")
        total += float(losses[learned[1:]].sum())
        tokens += int(learned[1:].sum())
    return math.exp(total / tokens), tokens


def _held_out(tokenizer: Tokenizer, turns: int) -> Iterator[tuple[Tensor, Tensor]]:
    for ids, learned in encoded(tokenizer, SEED, Split.HELD_OUT, turns):
        yield torch.tensor(ids), torch.tensor(learned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model.PATH, help="folder (default: %(default)s)")
    parser.add_argument(
        "--documents", type=int, default=1000, help="held-out documents to measure (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    plain = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    value, tokens = perplexity(model, plain, options.documents, turns=6)
    print(f"held-out perplexity {value:.3f} over {tokens:,} answer tokens of {options.documents:,} documents")
    for number, (form, parts) in enumerate(SAMPLES, start=1):
        text, ended = answer(model, tokenizer, prompt(tokenizer, form, parts))
        print(f"\n--- {number}. {form}{'' if ended else ' (cut off)'}")
        print("\n".join(f"> {line}" for part in parts for line in part.splitlines()))
        print(text.strip())


if __name__ == "__main__":
    main()
