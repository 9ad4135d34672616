"""The agents: how each is installed, pointed at a server and given a task, and how it names its tools."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.agents.installation import node_program, node_script, python_script

MODEL = "oatmill"
KEY = "unused"

Call = tuple[str, dict[str, Any]]  # name of a tool, and its arguments


def openai_variables(url: str) -> Mapping[str, str]:
    """Returns the variables that clients of OpenAI's API read."""
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY}


def anthropic_variables(url: str) -> Mapping[str, str]:
    """Returns the variables that clients of Anthropic's API read."""
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": KEY}


def _runs(name: str, **more: str) -> Callable[[str], Call]:
    """Returns how an agent executes a shell command. name: of its tool. more: arguments that it requires."""
    return lambda command: (name, {"command": command, **more})


@dataclass(frozen=True, slots=True)
class Agent:
    """One program.

    install: returns its command, and installs it if that has not been done. arguments: that follow, for the URL of a
    server and a task. environment: variables for a URL. run: the call that executes a shell command. answer: the call
    that ends a session, where the agent wants one. files: in its home, by path, for a URL. ignored: fields that it
    sends, and that the server reports as ignored, without places in lists. refused: codes of errors that it asks for,
    and does without.
    """

    name: str
    install: Callable[[], list[str]]
    arguments: Callable[[str, str], list[str]]
    environment: Callable[[str], Mapping[str, str]]
    run: Callable[[str], Call]
    answer: Callable[[str], Call] | None = None
    files: Callable[[str], Mapping[str, str]] = field(default=lambda url: {})
    ignored: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()


def _codex_settings(url: str) -> str:
    provider = {"name": MODEL, "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "OATMILL_KEY"}
    lines = (f'{key} = "{value}"' for key, value in provider.items())
    head = f'model = "{MODEL}"\nmodel_provider = "{MODEL}"\n\n[model_providers.{MODEL}]\n'
    return head + "\n".join(lines) + "\n"


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


def _continue_settings(url: str) -> dict[str, Any]:
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": f"{url}/v1", "apiKey": KEY}
    return {
        "name": MODEL,
        "version": "1.0.0",
        "schema": "v1",
        "models": [{**model, "roles": ["chat"], "capabilities": ["tool_use"]}],
    }


def _python_agent(name: str, script: str, packages: tuple[str, ...], *arguments: str, **more: Any) -> Agent:
    return Agent(
        name,
        partial(python_script, script, packages),
        lambda url, task: [*arguments, task],
        lambda url: {**openai_variables(url), "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        _runs("run"),
        **more,
    )


def _ai_sdk(api: str, mode: str) -> Agent:
    return Agent(
        f"ai-sdk-{api}-{mode}",
        partial(node_script, "ai_sdk", ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")),
        lambda url, task: [api, mode, task],
        lambda url: {**openai_variables(url), **anthropic_variables(url)},
        _runs("run"),
    )


def _smolagents(mode: str) -> Agent:
    return _python_agent(
        f"smolagents-{mode}",
        "smolagents_agent",
        ("smolagents[openai]",),
        mode,
        answer=lambda text: ("final_answer", {"answer": text}),
    )


AGENTS = (
    Agent(
        "claude",
        partial(node_program, "claude", ("@anthropic-ai/claude-code",)),
        lambda url, task: ["-p", task, "--allowedTools", "Bash"],
        lambda url: {
            **anthropic_variables(url),
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",  # a trained model on few cores takes minutes to read the prompt
        },
        _runs("Bash", description="Looks into the folder"),
    ),
    Agent(
        "codex",
        partial(node_program, "codex", ("@openai/codex",)),
        lambda url, task: ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", task],
        lambda url: {"OATMILL_KEY": KEY},
        lambda command: ("exec_command", {"cmd": command}),
        files=lambda url: {".codex/config.toml": _codex_settings(url)},
        ignored=frozenset({"tools (web_search)"}),
    ),
    Agent(
        "opencode",
        partial(node_program, "opencode", ("opencode-ai",)),
        lambda url, task: ["run", "-m", f"{MODEL}/{MODEL}", task],
        lambda url: {"OPENCODE_CONFIG_CONTENT": json.dumps(_opencode_settings(url))},
        _runs("bash", description="Looks into the folder"),
    ),
    Agent(
        "continue",
        partial(node_program, "cn", ("@continuedev/cli",)),
        lambda url, task: ["--auto", "-p", task],
        lambda url: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        _runs("Bash"),
        files=lambda url: {".continue/config.yaml": json.dumps(_continue_settings(url))},
    ),
    _python_agent("openai-agents", "openai_agents", ("openai-agents",)),
    _python_agent("pydantic-ai", "pydantic_agent", ("pydantic-ai-slim[openai]",)),
    _python_agent("langgraph", "langgraph_agent", ("langgraph", "langchain", "langchain-openai")),
    *map(_smolagents, ("whole", "stream")),
    *(_ai_sdk(api, mode) for api in ("openai", "anthropic") for mode in ("generate", "stream")),
    Agent(
        "anthropic-tool-runner",
        partial(node_script, "anthropic_runner", ("@anthropic-ai/sdk", "zod")),
        lambda url, task: [task],
        anthropic_variables,
        _runs("run"),
        refused=frozenset({"thread_unsupported_request"}),
    ),
)
