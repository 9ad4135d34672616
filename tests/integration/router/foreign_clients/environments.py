"""Clients whose dependencies are not ours: each runs in a virtual environment of its own, made when first needed."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_INSTALL_SECONDS = 600
_RUN_SECONDS = 500


class Environment:
    """A virtual environment with some packages. folder: kept between runs of the tests."""

    def __init__(self, folder: Path, *installs: list[str]) -> None:
        """installs: arguments of `pip install`, one after the other.

        Skips the test where there is no package index, or none that answers in time.
        """
        self._folder = folder
        ready = folder / "ready"
        if ready.exists() and ready.read_text() == json.dumps(installs):
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=_INSTALL_SECONDS)
        for arguments in installs:
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments]
            try:
                done = subprocess.run(pip, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip(f"{' '.join(arguments)} is not installed after {_INSTALL_SECONDS} seconds")
            if done.returncode != 0:
                pytest.skip(f"{' '.join(arguments)} cannot be installed here: {done.stderr.strip()[-300:]}")
        ready.write_text(json.dumps(installs))

    async def run(self, program: str, *arguments: str, text: str | None = None) -> tuple[int, str]:
        """Runs one of the environment's programs, with a text on its standard input.

        Returns the exit code, and what it printed.
        """
        process = await asyncio.create_subprocess_exec(
            str(self._folder / "bin" / program),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL if text is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(_RUN_SECONDS):
            output, _ = await process.communicate(None if text is None else text.encode())
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def ask(self, script: str, *arguments: str, asked: Any = None) -> dict[str, Any]:
        """Runs a script of this folder against a server; its last line is a JSON object of what came of it.

        asked: JSON for its standard input.
        """
        standard_input = None if asked is None else json.dumps(asked)
        code, output = await self.run("python", str(Path(__file__).parent / script), *arguments, text=standard_input)
        assert code == 0, output
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result
