"""Asks a router through a framework on top of OpenAI's interface; runs in an environment that has it."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

URL, FRAMEWORK = f"{sys.argv[1]}/v1", sys.argv[2]
HELLO: Any = [{"role": "user", "content": "How long does rice take?"}]


class Rice(BaseModel):
    """Tells how long rice takes."""

    minutes: int


def with_instructor() -> int:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=URL, api_key="none"))
    return client.chat.completions.create(model="tgi", messages=HELLO, response_model=Rice).minutes


def with_langchain() -> int:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=URL, api_key="none", model="tgi")
    (call,) = model.bind_tools([Rice]).invoke("Hello").tool_calls
    return call["args"]["minutes"]


def with_litellm() -> int:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices
    import litellm

    tool = {"type": "function", "function": {"name": "Rice", "parameters": Rice.model_json_schema()}}
    asked: Any = {"model": "openai/tgi", "api_base": URL, "api_key": "none", "messages": HELLO}
    try:
        litellm.completion(**asked, max_tokens=10**6)
    except litellm.ContextWindowExceededError:
        answer = litellm.completion(**asked, tools=[tool], tool_choice="required")
        return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["minutes"]
    return 0


def with_pydantic_ai() -> int:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tgi", provider=OpenAIProvider(base_url=URL, api_key="none"))
    return Agent(model, output_type=ToolOutput(Rice, name="Rice")).run_sync("Hello").output.minutes


def with_llama_index() -> int:
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model="tgi", api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True)
    return model.as_structured_llm(Rice).complete("Hello").raw.minutes


def with_openai_agents() -> int:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    @function_tool(name_override="Rice")
    def rice(minutes: int) -> str:
        return str(minutes)

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(model="tgi", openai_client=AsyncOpenAI(base_url=URL, api_key="none"))
    cook = Agent(name="cook", model=model, tools=[rice], tool_use_behavior="stop_on_first_tool")
    return int(Runner.run_sync(cook, "How long does rice take?").final_output)


ASK: dict[str, Callable[[], int]] = {
    "instructor": with_instructor,
    "langchain-openai": with_langchain,
    "litellm": with_litellm,
    "llama-index-llms-openai-like": with_llama_index,
    "openai-agents": with_openai_agents,
    "pydantic-ai-slim[openai]": with_pydantic_ai,
}
print(json.dumps({"minutes": ASK[FRAMEWORK]()}))
