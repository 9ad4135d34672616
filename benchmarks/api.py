"""Asks for text by the two HTTP interfaces that text-generation servers have, OpenAI's and TGI's.

Decoding is greedy, and `ignore_eos` asks for replies of full length. It is an extension of both interfaces, which a
server that does not have it passes over: its replies may be shorter then.
"""

import json
from typing import Any, Self

# {"role": "user" or "assistant", "content": text}
ChatMessage = dict[str, str]


class OpenAi:
    """`/v1/completions` and `/v1/chat/completions`. Both methods return the path and the body of a POST."""

    def __init__(self, model: str) -> None:
        self._model = model

    def named(self, model: str) -> Self:
        """Returns the same interface for another model of the server, such as an adapter."""
        return type(self)(model)

    def completion(self, prompt: str, new_tokens: int, stream: bool) -> tuple[str, bytes]:
        return "/v1/completions", self._body({"prompt": prompt}, new_tokens, stream)

    def chat(self, messages: list[ChatMessage], new_tokens: int, stream: bool) -> tuple[str, bytes]:
        return "/v1/chat/completions", self._body({"messages": messages}, new_tokens, stream)

    def _body(self, content: dict[str, Any], new_tokens: int, stream: bool) -> bytes:
        options: dict[str, Any] = {"model": self._model, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps(options | content | streaming).encode()


class Tgi(OpenAi):
    """`/generate` and `/generate_stream`; chats go to `/v1/chat/completions` in TGI too."""

    def __init__(self, model: str, adapter: str | None = None) -> None:
        super().__init__(adapter or model)
        self._adapter = adapter

    def named(self, model: str) -> Self:
        return type(self)(self._model, model)

    def completion(self, prompt: str, new_tokens: int, stream: bool) -> tuple[str, bytes]:
        parameters = {"max_new_tokens": new_tokens, "do_sample": False, "ignore_eos": True, "details": True}
        parameters |= {"adapter_id": self._adapter} if self._adapter else {}
        path = "/generate_stream" if stream else "/generate"
        return path, json.dumps({"inputs": prompt, "parameters": parameters}).encode()


APIS: dict[str, type[OpenAi]] = {"openai": OpenAi, "tgi": Tgi}
