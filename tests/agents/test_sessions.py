"""Each agent completes a session of three turns, in which it executes two calls.

The model is a script: which tool a small model calls, and whether it does, would be left to chance. All else is real,
the agent as its registry has it, HTTP, the router and its prefix cache.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shared.stubs import generate_pb2 as pb
from tests.agents.programs import AGENTS, MODEL, Agent
from tests.agents.proxy import Recorded, RecordingProxy
from tests.integration.router.conftest import EOS, Router, running_router

TASK = "List the files, then read notes.txt and say its second word."
NOTES = "kettle barley thimble"
ANSWER = "The second word is barley."
# Each call ends with a comment by which later prompts show that it has been made.
COMMANDS = ("ls # first-look", "cat notes.txt # second-look")
LONGEST_TOKENS = 131_072


@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_an_agent_completes_a_session(agent: Agent, tmp_path: Path) -> None:
    program = await asyncio.to_thread(agent.install)
    async with agents_router(tmp_path) as router:
        router.shard.script = lambda request: _next_turn(router, agent, request)
        async with RecordingProxy(router.url).running() as proxy:
            code, output = await run_agent(agent, program, proxy.url, tmp_path)
        print(_report(proxy.recorded))
        assert code == 0, output
        assert "barley" in output
        _check_requests(agent, proxy.recorded)
        _check_cache(_turns(router, agent))


@asynccontextmanager
async def agents_router(folder: Path) -> AsyncIterator[Router]:
    """Runs a router with room for the prompts of agents."""
    (folder / "router").mkdir()
    shard = {"max_total_tokens": LONGEST_TOKENS, "num_blocks": 2 * LONGEST_TOKENS // 16}
    async with running_router(folder / "router", shard, served_model_name=[MODEL]) as router:
        yield router


def written(router: Router, text: str) -> list[int]:
    """Returns the tokens of an answer."""
    return [*router.service.text.tokenizer.encode(text, add_special_tokens=False).ids, EOS]


def _next_turn(router: Router, agent: Agent, request: pb.Request) -> Sequence[int]:
    """Returns the tokens of a call, or of the answer once both calls are part of the prompt."""
    prompt = router.service.text.tokenizer.decode(list(request.input_ids))
    made = sum(command.partition("# ")[2] in prompt for command in COMMANDS)
    if not _has_tool(agent, prompt):
        text = "Notes"  # such as the title of a session, for which there are no tools
    elif made == len(COMMANDS):
        text = ANSWER if agent.answer is None else _call(*agent.answer(ANSWER))
    else:
        text = _call(*agent.run(COMMANDS[made]))
    return written(router, text)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments})


async def run_agent(agent: Agent, program: Sequence[str], url: str, folder: Path) -> tuple[int, str]:
    """Runs the agent in an empty folder but for the notes. Returns its exit code and what it printed."""
    home, work = folder / "home", folder / "work"
    work.mkdir()
    (work / "notes.txt").write_text(NOTES)
    home.mkdir()
    for path, text in agent.files(url).items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    process = await asyncio.create_subprocess_exec(
        *program,
        *agent.arguments(url, TASK),
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **agent.environment(url)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


def _check_requests(agent: Agent, recorded: Sequence[Recorded]) -> None:
    """Fails where something was refused, ignored without a note in the table of agents, or not executed."""
    failed = [each for each in recorded if each.status >= 400]
    assert [each for each in failed if not any(code in each.response.decode() for code in agent.refused)] == []
    names = (name.strip() for each in recorded for name in each.ignored.split(";"))
    ignored = {re.sub(r"\[\d+\]", "", name) for name in names if name}
    assert ignored <= agent.ignored
    assert any(NOTES in each.body.decode() for each in recorded), "the second call was not executed"


def _turns(router: Router, agent: Agent) -> list[pb.Request]:
    """Returns the requests that the script answered with a call, or after one."""
    decode = router.service.text.tokenizer.decode
    return [each for each in router.shard.received if _has_tool(agent, decode(list(each.input_ids)))]


def _has_tool(agent: Agent, prompt: str) -> bool:
    """Returns True if the prompt declares the agent's tool."""
    return f'"name": "{agent.run("")[0]}"' in prompt


def _check_cache(turns: Sequence[pb.Request]) -> None:
    """Fails unless each turn repeats the one before it, and finds that in the prefix cache."""
    assert len(turns) >= 3
    for before, after in pairwise(turns):
        pairs = zip(before.input_ids, after.input_ids, strict=False)
        repeated = next((place for place, (old, new) in enumerate(pairs) if old != new), len(before.input_ids))
        assert repeated >= 0.95 * len(before.input_ids), "the beginning of the prompt has changed"
        assert after.cached_tokens >= 0.95 * repeated


def _report(recorded: Sequence[Recorded]) -> str:
    lines = (f"{each.method} {each.path} {each.status} {len(each.body)} bytes {each.ignored}" for each in recorded)
    return "\n".join(lines)
