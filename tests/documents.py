"""The shell commands of the documents.

Each block is run by tests/integration/test_documented_commands.py as it stands, unless a comment above it says that it
is not, or that another test runs it:

    <!-- not run: needs a GPU -->
    <!-- run by tests/integration/router/test_adapters.py -->
    <!-- not run on this page: they measure for minutes -->

`unshare -rn python -m tests.documents PAGE ...` runs the blocks of pages in a network of their own, beside
`oatmill serve` if they call a server.
"""

import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from oatmill.services import is_listening

ROOT = Path(__file__).parents[1]
PAGES = [*(page for name in ("docs", "deploy", "examples") for page in sorted((ROOT / name).rglob("*.md"))),
         ROOT / "benchmarks" / "README.md", *sorted(ROOT.glob("*.md"))]  # fmt: skip
MARK = re.compile(r" *<!-- (not run: .+|run by tests/\S+|not run on this page: .+) -->")
_FENCE = re.compile(r" *```(\S*)$")
# What a block in no language begins with, if it is a shell's.
_COMMAND = re.compile(
    r"(curl|docker|export|git|grep|helm|kubectl|ln|lm_eval|make|npm|oatmill|pip|python3?|pytest|source|\."
    r"|text-generation-\w+|llm-functionalities|unshare|[\w./-]*/[\w-]+(?:\.sh|/python)?) |[a-zA-Z_]+=|make$"
)
_SERVERS = ("oatmill serve", "text-generation-launcher", "llm-functionalities")
_SERVER_URL = "http://127.0.0.1:8080"
_START_SECONDS, _BLOCK_SECONDS = 600, 300
_IFF_UP, _SIOCSIFFLAGS = 1, 0x8914
# Responses with an error end a block; a command that serves until it is stopped is stopped, and must end with 0.
_PRELUDE = 'curl() { command curl --fail-with-body -sS "$@"; }\n'


@dataclass(frozen=True, slots=True)
class ShellBlock:
    """A block of commands. line: of the page where it begins. mark: what the comment above it says."""

    page: str
    line: int
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def serves(self) -> bool:
        """True for a server in the foreground, which does not end by itself."""
        return self.text.startswith(_SERVERS) and not self.text.rstrip().endswith("&")

    @property
    def calls(self) -> bool:
        """True if the commands call a server that they have not started."""
        return not self.serves and (":8080" in self.text or "oatmill chat" in self.text)


def shell_blocks(page: Path) -> list[ShellBlock]:
    """Returns the blocks of commands in a page."""
    found, name = [], str(page.relative_to(ROOT))
    of_page: str | None = None
    lines = page.read_text(encoding="utf-8").splitlines()
    for start, language, block in _blocks(lines):
        above = [line for line in lines[:start] if line.strip()][-1:]
        mark = next((match[1] for match in map(MARK.fullmatch, above) if match), None)
        of_page = next((each[1] for each in map(MARK.fullmatch, lines[:start]) if each and "on this" in each[1]), None)
        commands = [line for line in block if line.strip() and not line.startswith("#")]
        if commands and (language in ("sh", "bash") or (not language and _COMMAND.match(commands[0]))):
            found.append(ShellBlock(name, start + 1, "\n".join(block).strip("\n") + "\n", mark or of_page))
    return found


def _blocks(lines: list[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Yields where each block begins, its language, and its lines without the indentation of all."""
    number = 0
    while number < len(lines):
        start = number
        if fence := _FENCE.match(lines[number]):
            end = next(each for each in range(start + 1, len(lines)) if lines[each].strip() == "```")
            yield start, fence[1], lines[start + 1 : end]
            number = end + 1
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            yield start, "", [line[4:] for line in lines[start:number]]
        else:
            number += 1


def to_run(page: Path) -> list[ShellBlock]:
    """Returns the blocks without a mark."""
    return [block for block in shell_blocks(page) if block.mark is None]


def main() -> None:
    """Runs the blocks of pages. The exit code is 1 if one fails, after its output."""
    blocks = [block for page in sys.argv[1:] for block in to_run(ROOT / page)]
    with socket.socket() as any_socket:  # or 127.0.0.1 leads nowhere
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    with ExitStack() as stack:
        if any(block.calls for block in blocks):
            stack.enter_context(_running("oatmill serve", _is_ready))
        failed = [block for block in blocks if not _runs(block)]
    sys.exit(1 if failed else 0)


def _runs(block: ShellBlock) -> bool:
    """Runs a block, and prints what it prints. A server is stopped as soon as it listens."""
    if block.serves:
        port = re.search(r"--port[ =](\d+)", block.text)
        with _running(block.text, lambda: is_listening(int(port[1]) if port else 8080)):
            print(f"{block}: it serves", flush=True)
        return True
    command = ["bash", "-euo", "pipefail", "-c", _PRELUDE + block.text]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BLOCK_SECONDS, check=False
    )
    print(f"{block}: exit code {result.returncode}\n{result.stdout}{result.stderr}", flush=True)
    return result.returncode == 0


@contextmanager
def _running(command: str, is_up: Callable[[], bool]) -> Iterator[None]:
    """Runs a server within the context. Raises SystemExit if it does not come up, or does not end with 0."""
    server = subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not is_up():
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command}: exit code {server.poll()}; it is not up")
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        status = server.wait(60)
    if status:
        sys.exit(f"{command}: exit code {status}")


def _is_ready() -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{_SERVER_URL}/health", timeout=5).status_code == 200
    return False


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    main()
