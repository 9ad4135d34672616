"""Asks a router through LangChain; runs in an environment that has it."""

import asyncio
import json
import sys

from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint


def endpoint(**parameters: object) -> HuggingFaceEndpoint:
    return HuggingFaceEndpoint(endpoint_url=sys.argv[1], max_new_tokens=100, **parameters)


def failure(stream: bool) -> str:
    broken = endpoint(temperature=-1.0)
    try:
        for _ in broken.stream("Hello") if stream else [broken.invoke("Hello")]:
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


async def leave() -> str:
    async for text in endpoint().astream("Hello"):
        return text
    return ""


print(
    json.dumps(
        {
            "text": endpoint().invoke("Hello"),
            "asynchronous": asyncio.run(endpoint().ainvoke("Hello")),
            "stream": list(endpoint().stream("Hello")),
            "stopped": endpoint(stop_sequences=["ice. T"]).invoke("Hello"),
            "error": failure(stream=False),
            "stream_error": failure(stream=True),
            "chat": ChatHuggingFace(llm=endpoint(), model_id="tgi").invoke("Hello").content,
            "left": asyncio.run(leave()),
        }
    )
)
