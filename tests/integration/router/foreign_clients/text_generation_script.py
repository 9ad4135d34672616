"""Asks a router through the `text-generation` package; runs in an environment that has it."""

import asyncio
import json
import sys
from collections.abc import Callable

from text_generation import AsyncClient, Client

client = Client(sys.argv[1])


def failure(ask: Callable[[], object]) -> str:
    try:
        ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


async def asynchronous() -> list[str]:
    whole = await AsyncClient(sys.argv[1]).generate("Hello", max_new_tokens=100)
    stream = AsyncClient(sys.argv[1]).generate_stream("Hello", max_new_tokens=100)
    return [whole.generated_text, "".join([response.token.text async for response in stream])]


async def leave() -> str:
    async for response in AsyncClient(sys.argv[1]).generate_stream("Hello", max_new_tokens=100):
        return response.token.text
    return ""


details = client.generate(
    "Hello", max_new_tokens=100, best_of=2, do_sample=True, decoder_input_details=True, top_n_tokens=2
).details
print(
    json.dumps(
        {
            "text": client.generate("Hello", max_new_tokens=100).generated_text,
            "finish_reason": details.finish_reason,
            "prefill": details.prefill[0].text,
            "others": len(details.best_of_sequences),
            "top_tokens": len(details.top_tokens[0]),
            "stream": [response.token.text for response in client.generate_stream("Hello", max_new_tokens=100)],
            "error": failure(lambda: client.generate("Hello", max_new_tokens=10**6)),
            "stream_error": failure(lambda: list(client.generate_stream("Hello", max_new_tokens=10**6))),
            "asynchronous": asyncio.run(asynchronous()),
            "chat": client.chat([{"role": "user", "content": "Hello"}]).choices[0].message.content,
            "left": asyncio.run(leave()),
        }
    )
)
