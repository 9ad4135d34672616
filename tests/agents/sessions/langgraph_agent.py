"""An agent of LangGraph, over chat completions."""

import subprocess
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def run(command: str) -> str:
    """Runs a shell command and returns its output."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


agent = create_agent(ChatOpenAI(model="oatmill"), tools=[run], system_prompt="Use the tool.")
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
