"""aider completes a session. It calls no tools: it is given files, edits them by blocks of text, and tests that."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from shared.stubs import generate_pb2 as pb
from tests.agents.installation import python_program
from tests.agents.programs import MODEL, Agent, openai_variables
from tests.agents.proxy import RecordingProxy
from tests.agents.test_sessions import NOTES, agents_router, run_agent, written
from tests.integration.router.conftest import Router

_TEST = "grep -q barley answer.txt"
AIDER = Agent(
    "aider",
    partial(python_program, "aider", ("aider-chat",)),
    lambda url, task: [
        *("--model", f"openai/{MODEL}", "--edit-format", "diff", "--no-git", "--yes-always", "--no-pretty"),
        *("--no-show-model-warnings", "--no-check-update", "--no-show-release-notes", "--analytics-disable"),
        *("--test-cmd", _TEST, "--auto-test", "--read", "notes.txt", "--message", task),
    ],
    lambda url: {**openai_variables(url), "OPENAI_API_BASE": f"{url}/v1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    lambda command: ("", {}),
)
WORDS = ("kettle", "thimble", "barley")
_EDIT = "answer.txt\n```\n<<<<<<< SEARCH\n{before}=======\n{after}>>>>>>> REPLACE\n```\n"


@pytest.mark.timeout(600)
async def test_aider_edits_a_file_until_its_test_passes(tmp_path: Path) -> None:
    program = await asyncio.to_thread(AIDER.install)
    async with agents_router(tmp_path) as router:
        router.shard.script = lambda request: _next_turn(router, request)
        async with RecordingProxy(router.url).running() as proxy:
            code, output = await run_agent(AIDER, program, proxy.url, tmp_path)
        assert code == 0, output
        assert [each for each in proxy.recorded if each.status >= 400 or each.ignored] == []
        assert len(router.shard.received) == len(WORDS)
        assert (tmp_path / "work" / "answer.txt").read_text() == "barley\n"
        assert any(NOTES in each.body.decode() for each in proxy.recorded), "the file was not read"


def _next_turn(router: Router, request: pb.Request) -> Sequence[int]:
    """Returns the tokens of an edit: one of the first word, and after each test of that one of the next."""
    prompt = router.service.text.tokenizer.decode(list(request.input_ids))
    made = sum(f"{word}\n>>>>>>> REPLACE" in prompt for word in WORDS)
    before = WORDS[made - 1] + "\n" if made else ""
    return written(router, _EDIT.format(before=before, after=WORDS[made] + "\n"))
