"""A hybrid model in a whole server: the next turn of a conversation continues from the state of the last one."""

from pathlib import Path

import httpx
import pytest

from tests.conftest import ServerFactory
from tests.servers import TextGenerationServer
from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make, make_tokenizer

TURN = "the quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak. " * 24


def conversation(server: TextGenerationServer) -> tuple[list[int], str, float]:
    """Returns the tokens of the first reply, the second reply, and how much of the first turn that found in the cache.

    The second prompt is sent as tokens: what a random model writes is not always read as the same ones again.
    """
    prompt = [token["id"] for token in httpx.post(f"{server.url}/tokenize", json={"inputs": TURN}).json()]
    options = {"max_new_tokens": 60, "details": True, "cache_salt": "a", "ignore_eos": True}
    reply = [token["id"] for token in server.generate(TURN, **options)["details"]["tokens"]]
    turn = [*prompt, *reply]
    body = {"model": "tgi", "prompt": [*turn, 5, 6, 7], "max_tokens": 20, "temperature": 0.0, "cache_salt": "a"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply, answer["choices"][0]["text"], cached / len(turn)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shards"), [("qwen3_next", 1), ("qwen3_next", 2), ("falcon_h1", 1)])
def test_a_conversation_goes_on_from_the_snapshots_of_its_states(
    family: str, shards: int, server: ServerFactory, tmp_path: Path
) -> None:
    folder = make(family, tmp_path / family, vocab_size=TOKENIZER_VOCAB_SIZE, max_position_embeddings=2048)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    flags = (f"--model-id={folder}", "--dtype=float32", "--max-batch-size=8")
    *replies, share = conversation(server(*flags, f"--num-shard={shards}").wait_until_ready())
    *expected, nothing = conversation(server(*flags, "--no-prefix-caching").wait_until_ready())
    print(f"{family}, {shards} shards: {share:.1%} of the first turn cached")
    assert replies == expected
    assert (share >= 0.95, nothing) == (True, 0.0), share
