"""The tokens that prompts are made of."""

import random
from pathlib import Path

from tokenizers import Tokenizer

from shared.stubs import generate_pb2 as pb
from tgi_server.grammar.tokenizer import read_definition
from tgi_server.router.errors import StartupError

TEXT = (
    "Wash the rice until the water stays clear. Bring it to the boil with twice as much water, then let it simmer with "
    "the lid on. Meanwhile cut the onions, the carrots and the peppers into small pieces, and fry them in some oil. "
)

# Different tokens of a prompt that is made without a tokenizer. Longer prompts repeat them.
ANY_TOKENS = 4096


def prompt_tokens(info: pb.InfoResponse, tokenizer_name: str | None, revision: str) -> list[int]:
    """Returns tokens that the model takes: those of a text, or without a tokenizer any but the special ones.

    Raises StartupError when the tokenizer cannot be had, or is that of another model.
    """
    if tokenizer_name is None:
        special = {*info.eos_token_ids, info.bos_token_id}
        ordinary = [token for token in range(info.vocab_size) if token not in special]
        return random.Random(0).choices(ordinary, k=ANY_TOKENS)
    tokens: list[int] = _load(tokenizer_name, revision).encode(TEXT, add_special_tokens=False).ids
    if not tokens or max(tokens) >= info.vocab_size:
        raise StartupError(
            f"the tokenizer {tokenizer_name} is not that of {info.model_id}, which has {info.vocab_size} tokens"
        )
    return tokens


def _load(name: str, revision: str) -> Tokenizer:
    try:
        if Path(name).is_dir():
            return Tokenizer.from_str(read_definition(Path(name)))
        return Tokenizer.from_pretrained(name, revision=revision)
    except Exception as error:  # the library raises no more special ones
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartupError(f"--tokenizer-name: the tokenizer of {name} cannot be loaded: {reason}") from error
