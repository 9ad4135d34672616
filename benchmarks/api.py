"""Asks for text by the two HTTP interfaces that text-generation servers have, OpenAI's and TGI's.

Decoding is greedy unless a load is sampled. `ignore_eos` requests replies of full length; it is an extension of both
interfaces, and a server without it ignores it and may send shorter replies.
"""

import json
from typing import Any, Self

# Of sampled loads.
_SAMPLING: dict[str, float] = {"temperature": 0.7, "top_p": 0.9}

# {"role": "user" or "assistant", "content": text, or a list of parts}
ChatMessage = dict[str, Any]


class OpenAi:
    """`/v1/completions` and `/v1/chat/completions`. Both methods return the path and the body of a POST."""

    def __init__(self, model: str, *, sampling: dict[str, float] | None = None) -> None:
        """sampling: temperature and so on; None: greedy."""
        self._model = model
        self._sampling = sampling

    def named(self, model: str) -> Self:
        """Returns the same interface for another model of the server, such as an adapter."""
        return type(self)(model, sampling=self._sampling)

    def sampled(self, top_k: int | None) -> Self:
        """Returns the same interface whose requests are sampled. top_k: of the requests; None: they have none."""
        return type(self)(self._model, sampling=_sampling(top_k))

    def completion(self, prompt: str, new_tokens: int, stream: bool) -> tuple[str, bytes]:
        return "/v1/completions", self._body({"prompt": prompt}, new_tokens, stream)

    def chat(self, messages: list[ChatMessage], new_tokens: int, stream: bool) -> tuple[str, bytes]:
        return "/v1/chat/completions", self._body({"messages": messages}, new_tokens, stream)

    def _body(self, content: dict[str, Any], new_tokens: int, stream: bool) -> bytes:
        options: dict[str, Any] = {"model": self._model, "max_tokens": new_tokens, "ignore_eos": True}
        options |= self._sampling or {"temperature": 0}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps(options | content | streaming).encode()


class Tgi(OpenAi):
    """`/generate` and `/generate_stream`; chats go to `/v1/chat/completions` in TGI too."""

    def __init__(self, model: str, adapter: str | None = None, *, sampling: dict[str, float] | None = None) -> None:
        super().__init__(adapter or model, sampling=sampling)
        self._adapter = adapter

    def named(self, model: str) -> Self:
        return type(self)(self._model, model, sampling=self._sampling)

    def sampled(self, top_k: int | None) -> Self:
        return type(self)(self._model, self._adapter, sampling=_sampling(top_k))

    def completion(self, prompt: str, new_tokens: int, stream: bool) -> tuple[str, bytes]:
        parameters: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_eos": True, "details": True}
        parameters |= {"do_sample": self._sampling is not None} | (self._sampling or {})
        parameters |= {"adapter_id": self._adapter} if self._adapter else {}
        path = "/generate_stream" if stream else "/generate"
        return path, json.dumps({"inputs": prompt, "parameters": parameters}).encode()


def _sampling(top_k: int | None) -> dict[str, float]:
    return _SAMPLING | ({} if top_k is None else {"top_k": top_k})


APIS: dict[str, type[OpenAi]] = {"openai": OpenAi, "tgi": Tgi}
