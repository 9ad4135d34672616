"""The demo model in `transformers`, and a way to ask it."""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tgi_server import demo_model

Answer = tuple[str, bool]
MAX_NEW_TOKENS = 160
INSTRUCTION = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
INSTRUCTION_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)


@pytest.fixture(scope="package")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model.PATH)


@pytest.fixture(scope="package")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="package")
def prompt(tokenizer: PreTrainedTokenizerBase) -> Callable[[str, Sequence[str]], str]:
    """Makes the text that the model is given, in one of the three forms that it knows, special tokens included."""

    def made(form: str, parts: Sequence[str]) -> str:
        if form == "chat":
            turns = [{"role": ("user", "assistant")[index % 2], "content": part} for index, part in enumerate(parts)]
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        forms = {"bare": "{}", "alpaca": INSTRUCTION if len(parts) == 1 else INSTRUCTION_WITH_INPUT}
        return str(tokenizer.bos_token) + forms[form].format(*parts)

    return made


@pytest.fixture(scope="package")
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], Answer]:
    """Gives the greedy answer to a text, and True when the answer ended by itself."""

    @torch.inference_mode()
    def answered(text: str) -> Answer:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0]
        new = output[inputs["input_ids"].shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True), bool(new[-1] == tokenizer.eos_token_id)

    return answered
