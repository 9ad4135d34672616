"""Asks a server through Outlines, in its ways for TGI, OpenAI and vLLM; runs in an environment that has it.

    outlines_script.py URL

What comes of it is checked by the test: the server's model decides what is said, Outlines only how.
"""

import asyncio
import json
import sys
from typing import Any, Literal

import outlines
from huggingface_hub import AsyncInferenceClient, InferenceClient
from openai import AsyncOpenAI, OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1]
OPENAI: Any = {"base_url": f"{URL}/v1", "api_key": "none"}
PROMPT = "How long do I boil an egg?"


class Rice(BaseModel):
    """Tells how long rice takes. It has no other members: a small model that is sampled would find no end of them."""

    model_config = ConfigDict(extra="forbid")

    minutes: int = Field(ge=1, le=99)
    kind: Literal["brown", "white"]


TYPES: dict[str, Any] = {
    "integer": int,
    "choice": Literal["eggs", "rice"],
    "regex": Regex("[0-9]{1,3} minutes"),
    "object": Rice,
}


async def asynchronous() -> list[str]:
    tgi = outlines.from_tgi(AsyncInferenceClient(URL))
    vllm = outlines.from_vllm(AsyncOpenAI(**OPENAI), "tgi")
    streamed = [piece async for piece in vllm.stream(PROMPT, Rice, max_tokens=60)]
    return [await tgi(PROMPT, Rice, max_new_tokens=60), "".join(streamed)]


tgi = outlines.from_tgi(InferenceClient(URL))
openai = outlines.from_openai(OpenAI(**OPENAI), "tgi")
vllm = outlines.from_vllm(OpenAI(**OPENAI), "tgi")
sglang = outlines.from_sglang(OpenAI(**OPENAI), "tgi")
print(
    json.dumps(
        {
            "tgi": {name: tgi(PROMPT, kind, max_new_tokens=60) for name, kind in TYPES.items()},
            "vllm": {name: vllm(PROMPT, kind, max_tokens=60) for name, kind in TYPES.items()},
            "sglang": {name: sglang(PROMPT, kind, max_tokens=60) for name, kind in TYPES.items()},
            "openai": {"object": openai(PROMPT, Rice, max_tokens=60)},
            "grammar": vllm(PROMPT, CFG('start: "boil " ("eggs" | "rice")'), max_tokens=60),
            "stream": "".join(tgi.stream(PROMPT, Rice, max_new_tokens=60)),
            "plain": tgi(PROMPT, max_new_tokens=10),
            "asynchronous": asyncio.run(asynchronous()),
        }
    )
)
