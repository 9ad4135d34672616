"""The agents: how each is installed, pointed at a server and given a task, and how it names its tools."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where agents are installed; a second run installs nothing.
CACHE = Path(__file__).parents[2] / "runs" / "agents"
MODEL = "oatmill"
KEY = "unused"

Call = tuple[str, dict[str, Any]]  # name of a tool, and its arguments


@dataclass(frozen=True, slots=True)
class Agent:
    """One program.

    packages: of its registry, in their newest versions. command: the arguments after the program, for the URL of a
    server, and a task. environment: the same for the variables. run: the call that executes a shell command.
    ignored: fields that it sends, and that the server reports as ignored, without places in lists.
    """

    name: str
    packages: tuple[str, ...]
    command: Callable[[str, str], list[str]]
    environment: Callable[[str], Mapping[str, str]]
    run: Callable[[str], Call]
    ignored: frozenset[str] = frozenset()
    node: bool = True

    def install(self) -> Path:
        """Returns the program. Installs it, if that has not been done."""
        return self._node_program() if self.node else self._python_program()

    def _node_program(self) -> Path:
        folder = CACHE / "npm"
        program = folder / "node_modules" / ".bin" / self.name
        if not program.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _call("npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *_newest(self.packages))
        if not _starts(program):  # npm may leave out the steps that a package wants after its installation
            _call("npm", "rebuild", "--prefix", str(folder), "--foreground-scripts", *self.packages)
        return program

    def _python_program(self) -> Path:
        folder = CACHE / "python"
        marker = folder / f"{self.name}.installed"
        if not marker.exists():
            _call(sys.executable, "-m", "venv", str(folder))
            _call(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade", *self.packages)
            marker.touch()
        return folder / "bin" / "python"


def _newest(packages: tuple[str, ...]) -> list[str]:
    return [f"{package}@latest" for package in packages]


def _call(*arguments: str) -> None:
    subprocess.run(arguments, check=True, stdin=subprocess.DEVNULL)


def _starts(program: Path) -> bool:
    return subprocess.run([program, "--version"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def _codex_settings(url: str) -> list[str]:
    provider = {"name": MODEL, "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "OATMILL_KEY"}
    table = ", ".join(f'{key}="{value}"' for key, value in provider.items())
    return ["-c", f"model_provider={MODEL}", "-c", f"model_providers.{MODEL}={{{table}}}", "-m", MODEL]


def _opencode_settings(url: str) -> dict[str, Any]:
    return {
        "provider": {
            MODEL: {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
                "models": {MODEL: {"limit": {"context": 65_536, "output": 8_192}}},
            }
        },
        "permission": {"bash": "allow"},
        "autoupdate": False,
    }


def _python_script(name: str) -> list[str]:
    return [str(Path(__file__).parent / "sessions" / f"{name}.py")]


AGENTS = (
    Agent(
        "claude",
        ("@anthropic-ai/claude-code",),
        lambda url, task: ["-p", task, "--allowedTools", "Bash"],
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        lambda command: ("Bash", {"command": command, "description": "Looks into the folder"}),
    ),
    Agent(
        "codex",
        ("@openai/codex",),
        lambda url, task: [
            *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *_codex_settings(url), task),
        ],
        lambda url: {"OATMILL_KEY": KEY},
        lambda command: ("exec_command", {"cmd": command}),
        ignored=frozenset({"tools (web_search)"}),
    ),
    Agent(
        "opencode",
        ("opencode-ai",),
        lambda url, task: ["run", "-m", f"{MODEL}/{MODEL}", task],
        lambda url: {"OPENCODE_CONFIG_CONTENT": json.dumps(_opencode_settings(url))},
        lambda command: ("bash", {"command": command, "description": "Looks into the folder"}),
    ),
    Agent(
        "openai-agents",
        ("openai-agents",),
        lambda url, task: [*_python_script("openai_agents"), task],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        lambda command: ("run", {"command": command}),
        node=False,
    ),
    Agent(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]",),
        lambda url, task: [*_python_script("pydantic_agent"), task],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY},
        lambda command: ("run", {"command": command}),
        node=False,
    ),
    Agent(
        "langgraph",
        ("langgraph", "langchain", "langchain-openai"),
        lambda url, task: [*_python_script("langgraph_agent"), task],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY},
        lambda command: ("run", {"command": command}),
        node=False,
    ),
)
