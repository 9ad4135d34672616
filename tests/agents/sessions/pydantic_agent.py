"""An agent of Pydantic AI, over chat completions."""

import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("oatmill"), instructions="Use the tool.")


@agent.tool_plain
def run(command: str) -> str:
    """Runs a shell command and returns its output."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


print(agent.run_sync(sys.argv[1]).output)
