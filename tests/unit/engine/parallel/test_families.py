"""The families of text models that are downloaded most, each over two shards with all that the engine has at once:
prompts in chunks, what is cached of a prefix, drafts, adapters. Prints a row for each; `-rP` shows them.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny_models import make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.lora.adapted import make_adapted
from tests.unit.engine.requests import MAX_TOTAL_TOKENS, NEW, generated, load_engine, prompts
from tgi_server.contract import StateSave, StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.speculation.costs import StepCosts

# By names of models in the hub's lists; each is one of its architectures.
FAMILIES = (
    *("arcee", "gptj", "ministral", "mpt_6_heads", "nemotron", "olmoe", "persimmon", "santacoder"),
    *("bloom", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "exaone4", "falcon_40b"),
    *("falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "granite", "granitemoehybrid"),
    *("helium", "kimi_linear", "lfm2", "lfm2_moe", "llama3", "llama4_text", "mimo_v2_flash", "minimax_m2", "mistral"),
    *("mixtral", "nemotron_h", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
(TEXT,) = prompts((70,))
# Tokens of a chunk, and of the prefix that a later request finds.
CHUNK, CACHED = 7, 64


@dataclass
class Found:
    """What a shard found: replies by what was tried, and numbers of tokens."""

    paged: bool
    states: bool
    replies: dict[str, list[int]]
    drafted: int
    accepted: int


def everything(group: ShardGroup, folder: Path, adapter: Path, reply: list[int]) -> Found:
    engine = load_engine(folder, group=group, speculate=4)
    engine.adapters.put("a0", engine.adapters.read(adapter))
    capacity = engine.warm_up(max_batch_size=4, max_prefill_tokens=256, max_total_tokens=MAX_TOTAL_TOKENS)
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    blocks = list(range(1, 1 + MAX_TOTAL_TOKENS // engine.info.block_size))
    assert capacity.num_blocks >= len(blocks)

    def sequence(number: int, **state) -> RunningSequence:
        return RunningSequence(number, TEXT, StoppingParameters(NEW, ignore_eos=True), **state)

    driver, replies = Driver(engine), {}
    whole, rest = divmod(len(TEXT), CHUNK)
    output = driver.add(sequence(1, blocks=list(blocks)), [CHUNK] * whole + [rest] * (rest > 0))
    driver.run()
    replies["chunks"] = output.tokens
    engine.clear()
    saves = [StateSave(2, CACHED, 1)] if engine.info.states else []
    engine.step(1, [sequence(2, blocks=list(blocks))], [(2, len(TEXT))], saves=saves).collect()
    engine.clear()
    driver = Driver(engine)
    again = sequence(3, blocks=list(blocks), computed=CACHED, earlier_reply=list(reply))
    again.snapshot = 1 if engine.info.states else 0
    (output,) = driver.run(again)
    replies["prefix and drafts"] = output.tokens
    found = driver.drafted, driver.accepted
    (output,) = Driver(engine).run(sequence(4, adapter_id="a0"))
    return Found(engine.info.paged, engine.info.states, replies | {"adapter": output.tokens}, *found)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_the_engine_has(family: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    model = make_adapted(make(family, tmp_path / "model"), count=1)
    reply, adapted = (generated(model.merged[each], TEXT) for each in ("", "a0"))
    assert adapted != reply
    first, second = ranks_of(2).run(everything, model.folder, model.adapters["a0"], reply)
    assert first == second
    print(
        f"| {family} | {'paged, states' if first.states else 'paged'} | chunks of {CHUNK} | "
        f"{CACHED} of {len(TEXT)} cached | 2 shards | {first.accepted} of {first.drafted} drafted tokens | adapter |"
    )
    assert first.paged
    assert first.replies == {"chunks": reply, "prefix and drafts": reply, "adapter": adapted}
    assert first.accepted == first.drafted > 0
