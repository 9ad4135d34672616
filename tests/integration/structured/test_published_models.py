"""Tools and formats of answers with the files of published models, through a real server with random weights."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.conftest import ServerFactory
from tests.published_tokenizers import PUBLISHED, Published
from tgi_server.router.answers.reasoning import reasoning_tags

MESSAGES: Any = [{"role": "user", "content": "What of <b>Paris</b>?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a <b>", "</think>", "<|im_end|> [INST]"]},
    },
    "required": ["place", "kind"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": SCHEMA}}
    for name in ("weather", "clock")
]
NAMED: Any = {"type": "function", "function": {"name": "clock"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


@pytest.mark.slow
@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
def test_calls_and_json(published: Published, server: ServerFactory, tmp_path: Path) -> None:
    folder = published.save_model(tmp_path / "model", max_position_embeddings=4096)
    running = server(f"--model-id={folder}", "--dtype=float32").wait_until_ready()
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    # Thoughts are to end soon.
    tags = reasoning_tags("auto", published.template)
    ends = [] if tags is None else published.tokenizer.encode(tags.end, add_special_tokens=False).ids[:1]
    bias = {str(token): 5 for token in ends}
    for seed in range(3):
        options: Any = {"model": "tgi", "messages": MESSAGES, "max_tokens": 1500, "seed": seed, "logit_bias": bias}
        for choice, names in (("required", {"weather", "clock"}), (NAMED, {"clock"})):
            answer = client.chat.completions.create(**options, tools=TOOLS, tool_choice=choice).choices[0]
            assert answer.finish_reason == "tool_calls"
            assert not answer.message.content
            for call in answer.message.tool_calls or ():
                assert call.type == "function"
                assert call.function.name in names
                jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        answer = client.chat.completions.create(**options, response_format=FORMAT).choices[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content or ""), SCHEMA)
        auto = client.chat.completions.create(**options, tools=TOOLS).choices[0]
        assert auto.message.content or auto.message.tool_calls or auto.finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "gpt_oss", "minimax_m2", "gemma4", "seed_oss"])
@pytest.mark.parametrize("flags", [(), ("--speculate=4",)], ids=["plain", "drafts"])
def test_thoughts_within_a_budget(name: str, flags: tuple[str, ...], server: ServerFactory, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    folder = published.save_model(tmp_path / "model")
    running = server(f"--model-id={folder}", "--dtype=float32", *flags).wait_until_ready()
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    tags = reasoning_tags("auto", published.template)
    assert tags is not None
    closing = published.tokenizer.decode(
        published.tokenizer.encode(tags.end, add_special_tokens=False).ids[:1], skip_special_tokens=False
    )
    for budget in (0, 1, 12):
        options: Any = {
            "model": "tgi",
            "max_tokens": 200,
            "seed": budget,
            "extra_body": {"thinking_token_budget": budget},
        }
        answer = client.completions.create(**options, prompt=f"What of Paris?{tags.begin}", logprobs=0).choices[0]
        assert answer.logprobs is not None
        assert (answer.logprobs.tokens or []).index(closing) <= budget
        begun = [*MESSAGES, {"role": "assistant", "content": tags.begin}]
        chat: Any = {**options, "messages": begun, "response_format": FORMAT}
        chat["extra_body"] = {**chat["extra_body"], "continue_final_message": True}
        whole = client.chat.completions.create(**chat, logprobs=True).choices[0]
        jsonschema.validate(json.loads(whole.message.content or ""), SCHEMA)
        assert whole.logprobs is not None
        # In the middle of a character, the grammar wants the rest of it first.
        assert [each.token for each in whole.logprobs.content or ()].index(closing) <= budget + 3
        streamed = client.chat.completions.create(**chat, stream=True)
        deltas = [chunk.choices[0].delta for chunk in streamed]
        assert "".join(delta.content or "" for delta in deltas) == whole.message.content
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (
            getattr(whole.message, "reasoning_content", None) or ""
        )
        thinking: Any = {"type": "enabled", "budget_tokens": budget}
        message: Any = {"model": "tgi", "max_tokens": 100, "messages": begun, "thinking": thinking}
        message["extra_body"] = {"seed": budget}
        with Anthropic(base_url=running.url, api_key="none", max_retries=0) as other:
            sent = other.messages.create(**message)
            with other.messages.stream(**message) as stream:
                assert [each.to_dict() for each in stream.get_final_message().content] == [
                    each.to_dict() for each in sent.content
                ]
        thoughts = [block for block in sent.content if block.type == "thinking"]
        assert len(thoughts) == (budget > 0)
