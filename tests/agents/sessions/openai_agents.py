"""An agent of the OpenAI Agents SDK, over the Responses API."""

import subprocess
import sys

from agents import Agent, Runner, function_tool


@function_tool
def run(command: str) -> str:
    """Runs a shell command and returns its output."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


agent = Agent(name="Looker", instructions="Use the tool.", model="oatmill", tools=[run])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
