"""An agent of smolagents that calls tools, over chat completions. Arguments: `whole` or `stream`, and the task."""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def run(command: str) -> str:
    """Runs a shell command and returns its output.

    Args:
        command: The command.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


model = OpenAIModel("oatmill", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent([run], model, stream_outputs=sys.argv[1] == "stream", max_steps=5)
print(agent.run(sys.argv[2]))
