"""Families of models in whole servers: chunks, prefix cache, shards, drafts and adapters at once.

Prints a row for each; `-rP` shows them.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.conftest import ServerFactory
from tests.tiny_models import HYBRIDS, TOKENIZER_VOCAB_SIZE, make, make_tokenizer
from tests.unit.engine.lora.adapted import make_adapted
from tests.unit.engine.requests import generated

# One with latents, one with windows, one with states; all of them: tests/unit/engine/parallel/test_families.py.
FAMILIES = ("deepseek_v3", "olmo3", "qwen3_next")
TEXT = "the quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak. " * 24
# Less than a prompt has, so that it is computed in chunks.
CHUNK = 100


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_a_server_has(family: str, server: ServerFactory, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model", vocab_size=TOKENIZER_VOCAB_SIZE, max_position_embeddings=2048)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    model = make_adapted(folder, count=1)
    listed = ",".join(f"{name}={place}" for name, place in model.adapters.items())
    running = server(
        *(f"--model-id={folder}", "--dtype=float32", "--num-shard=2", "--speculate=3", f"--lora-adapters={listed}"),
        *(f"--max-batch-prefill-tokens={CHUNK}", "--max-total-tokens=1024", "--max-batch-size=8"),
    ).wait_until_ready()
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    assert len(prompt) > 2 * CHUNK

    def ask(adapter: str = "") -> list[int]:
        parameters: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "details": True, "cache_salt": "a"}
        answer = running.generate(TEXT, **parameters, **({"adapter_id": adapter} if adapter else {}))
        return [token["id"] for token in answer["details"]["tokens"]]

    reply = ask()
    assert reply == generated(model.merged[""], prompt)
    assert ask() == reply  # with the prefix cache, and drafts of the reply before
    turn = [*prompt, *reply]
    body = {"model": "tgi", "prompt": [*turn, 5, 6, 7], "max_tokens": 4, "temperature": 0.0, "cache_salt": "a"}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    adapted = ask("a0")
    assert adapted == generated(model.merged["a0"], prompt)
    info = httpx.get(f"{running.url}/info").json()
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    values = {name: value for name, _, value in (line.rpartition(" ") for line in lines)}
    drafted, accepted = (values[f"tgi_batch_{kind}_tokens"] for kind in ("speculated", "accepted"))
    print(
        f"| {family} | paged {info['paged']} | {len(prompt)} tokens in chunks of {CHUNK} | "
        f"cached {cached} of {len(turn)} | 2 shards | drafts accepted {accepted} of {drafted} | "
        f"adapter {'changes the reply' if adapted != reply else 'leaves the reply'} |"
    )
    assert info["paged"]
    # With drafts, a hybrid has snapshots of its prompt alone, the last one behind its last whole block.
    assert cached >= (len(prompt) - 32 if family in HYBRIDS else len(turn) - 1)
    assert info["speculate"] == 3
