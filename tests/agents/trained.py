"""Runs sessions of agents with a server that has a trained model: `python -m tests.agents.trained URL [AGENT ...]`.

What a small model does is left to it, so nothing is checked. Each request is printed with its status, the fields that
were ignored, and the share of the prompt before it that it found in the prefix cache, which everybody shares and so
finds in steps of 128 tokens.
"""

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.agents.programs import AGENTS, Agent
from tests.agents.proxy import Recorded, RecordingProxy
from tests.agents.test_aider import AIDER
from tests.agents.test_sessions import run_agent

_STEP = 128
_COUNTS = {
    "prompt": re.compile(r'"(?:prompt_tokens|input_tokens)":(\d+)'),
    "cached": re.compile(r'"(?:cached_tokens|cache_read_input_tokens)":(\d+)'),
    "answer": re.compile(r'"(?:completion_tokens|output_tokens)":(\d+)'),
}


async def _session(agent: Agent, url: str, limit: float) -> None:
    program = await asyncio.to_thread(agent.install)
    with tempfile.TemporaryDirectory() as folder:
        async with RecordingProxy(url).running() as proxy:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(limit):
                    code, output = await run_agent(agent, program, proxy.url, Path(folder))
            except TimeoutError:
                code, output = None, f"stopped after {limit:.0f} s"
        seconds = time.monotonic() - begun
    print(f"== {agent.name}: exit code {code}, {seconds:.0f} s\n{output.strip()[-500:]}")
    print(*_lines(proxy.recorded), sep="\n", flush=True)


def _lines(recorded: Sequence[Recorded]) -> list[str]:
    lines, before = [], 0
    for each in recorded:
        text = each.response.decode(errors="replace")
        counts = {name: int(found[-1]) if (found := known.findall(text)) else 0 for name, known in _COUNTS.items()}
        if each.path.endswith("/messages"):  # whose count of the prompt leaves out what was cached
            counts["prompt"] += counts["cached"]
        share = f"{counts['cached'] / before:.1%} of the prompt before" if before and counts["prompt"] else ""
        before = counts["prompt"] // _STEP * _STEP or before
        called = "a call" if re.search(r'"(tool_use|function_call|tool_calls)"', text) else "text"
        lines.append(f"{each.method} {each.path} {each.status} {counts} {called} {share} {each.ignored}".rstrip())
    return lines


async def _main() -> None:
    known = {each.name: each for each in (*AGENTS, AIDER)}
    parser = argparse.ArgumentParser(description="Runs sessions of agents with a server that has a trained model.")
    parser.add_argument("url", help="of the server")
    parser.add_argument("agent", nargs="*", help=f"default: all; {', '.join(known)}")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a session (default: 900)")
    arguments = parser.parse_intermixed_args()
    for name in arguments.agent or known:
        await _session(known[name], arguments.url.rstrip("/"), arguments.limit)


if __name__ == "__main__":
    asyncio.run(_main())
