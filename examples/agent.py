"""An agent: the model calls functions of this program, reads what they return, and answers.

    python examples/agent.py [URL] [QUESTION]

The calls come in a stream. Their arguments always fit the functions' schemas, so they can be called as they are.
"""

import json
import sys

from openai import OpenAI

STOCK = {"screws": 120, "wall plugs": 0, "hooks": 4}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "in_stock",
            "description": "How many of an item are in the workshop",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string", "enum": list(STOCK)}},
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }
]
MOST_ROUNDS = 4


def ask(client: OpenAI, messages: list[dict], tool_choice: str) -> dict:
    """Returns the model's message, put together from a stream of chunks."""
    message = {"role": "assistant", "content": "", "tool_calls": []}
    calls = message["tool_calls"]
    stream = client.chat.completions.create(
        model="tgi", messages=messages, tools=TOOLS, tool_choice=tool_choice, max_tokens=200, temperature=0, stream=True
    )
    for chunk in stream:
        delta = chunk.choices[0].delta if chunk.choices else None
        message["content"] += (delta and delta.content) or ""
        for part in (delta and delta.tool_calls) or ():
            if part.index == len(calls):
                calls.append({"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}})
            calls[part.index]["function"]["name"] += part.function.name or ""
            calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    return message if calls else {"role": "assistant", "content": message["content"]}


def main() -> None:
    url, question, *_ = [*sys.argv[1:], *["http://127.0.0.1:8080", "Are there enough hooks?"][len(sys.argv) - 1 :]]
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    messages: list[dict] = [{"role": "user", "content": question}]
    for round_number in range(MOST_ROUNDS):
        message = ask(client, messages, "required" if round_number == 0 else "auto")
        messages.append(message)
        for call in message.get("tool_calls", ()):
            item = json.loads(call["function"]["arguments"])["item"]
            print(f"calls: in_stock({item!r}) -> {STOCK[item]}", flush=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(STOCK[item])})
        if not message.get("tool_calls"):
            print("answer:", message["content"])
            return
    print("answer: none, after", MOST_ROUNDS, "rounds of calls")


if __name__ == "__main__":
    main()
