"""Members of JSON answers that are sent as they are complete, through real servers and clients."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.integration.llm_functionalities.service import running_service
from tests.servers import TextGenerationServer

NAMES = [f"field {number}" for number in range(10)]
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        **{name: {"type": "string", "minLength": 4, "maxLength": 12} for name in NAMES[:7]},
        NAMES[7]: {"type": "integer", "minimum": 1, "maximum": 90},
        NAMES[8]: {"type": "array", "items": {"enum": ["bell", "gong"]}, "minItems": 2, "maxItems": 2},
        NAMES[9]: {"type": "boolean"},
    },
    "required": NAMES,
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
MEMBERS = {"include_members": True}
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "stream": True}
LONG = 30_000  # milliseconds


@pytest.fixture
def client(demo_server: TextGenerationServer) -> OpenAI:
    return OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


def check(events: list[tuple[str, dict[str, Any] | None]]) -> None:
    """events: the text and the member of each event, in order."""
    answer = json.loads("".join(text for text, _ in events))
    assert list(answer) == NAMES
    so_far = ""
    members = []
    for text, member in events:
        so_far += text
        if member is None:
            continue
        assert text == ""
        members.append((member["name"], member["value"]))
        # It is complete, and what follows it has hardly begun.
        end = so_far.index(json.dumps(member["value"]), so_far.index(json.dumps(member["name"])))
        assert len(so_far) < end + len(json.dumps(member["value"])) + 20
    assert members == list(answer.items())


def test_openai_client_reads_members(client: OpenAI) -> None:
    chat: Any = client.chat.completions
    messages = [{"role": "user", "content": "A form, please."}]
    chunks = list(chat.create(model="tgi", messages=messages, response_format=FORMAT, stream_options=MEMBERS, **ASKED))
    check([(chunk.choices[0].delta.content, getattr(chunk.choices[0], "member", None)) for chunk in chunks])
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    plain = list(chat.create(model="tgi", messages=messages, response_format=FORMAT, **ASKED))
    assert not any(hasattr(chunk.choices[0], "member") for chunk in plain)
    assert "".join(chunk.choices[0].delta.content for chunk in plain) == "".join(
        chunk.choices[0].delta.content for chunk in chunks
    )


def test_choices_have_their_own_members_beside_usage_and_logprobs(client: OpenAI) -> None:
    chat: Any = client.chat.completions
    asked = ASKED | {"temperature": 1, "seed": 1, "n": 2, "logprobs": True}
    chunks = chat.create(
        model="tgi",
        messages=[{"role": "user", "content": "A form, please."}],
        response_format=FORMAT,
        stream_options=MEMBERS | {"include_usage": True},
        **asked,
    )
    events: dict[int, list[tuple[str, Any]]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk.choices:
            member = getattr(choice, "member", None)
            assert member is None or choice.logprobs.content == []
            events[choice.index].append((choice.delta.content, member))
    assert events[0] != events[1]
    for each in events.values():
        check(each)


def test_completions_have_members(client: OpenAI) -> None:
    completions: Any = client.completions
    chunks = completions.create(
        model="tgi", prompt="A form:", stream_options=MEMBERS, extra_body={"guided_json": FORM}, **ASKED
    )
    check([(chunk.choices[0].text, getattr(chunk.choices[0], "member", None)) for chunk in chunks])


def test_huggingface_client_reads_members(demo_server: TextGenerationServer) -> None:
    client: Any = InferenceClient(demo_server.url)
    messages = [{"role": "user", "content": "A form, please."}]
    chunks = list(client.chat_completion(messages, response_format=FORMAT, stream_options=MEMBERS, **ASKED))
    check([(chunk.choices[0].delta.content, getattr(chunk.choices[0], "member", None)) for chunk in chunks])


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        ({"response_format": FORMAT}, "`stream`"),
        ({"stream": True}, "JSON"),
        ({"stream": True, "guided_regex": "[0-9]+"}, "JSON"),
        ({"stream": True, "guided_choice": ["a", "b"]}, "JSON"),
    ],
)
def test_members_of_an_answer_without_them_are_refused(
    demo_server: TextGenerationServer, body: dict[str, Any], needs: str
) -> None:
    for path, prompt in (
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("completions", {"prompt": "a"}),
    ):
        asked = {**prompt, **body, "stream_options": MEMBERS}
        response = httpx2.post(f"{demo_server.url}/v1/{path}", json=asked)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "stream_options.include_members")
        assert needs in error["message"]


@pytest.fixture(scope="module")
def channel(demo_server: TextGenerationServer) -> Iterator[grpc.Channel]:
    with running_service("--endpoint", demo_server.url) as service, service.channel() as channel:
        yield channel


def form(**more: Any) -> llm_pb2.ModelRequest:
    grammar = llm_pb2.Grammar(json_schema=json.dumps(FORM))
    return llm_pb2.ModelRequest(
        **{"formatted_prompt": "A form:", "max_tokens": 400, "timeout": LONG, "grammar": grammar, "members": True}
        | more
    )


def test_grpc_streams_have_members(channel: grpc.Channel) -> None:
    responses = list(llm_pb2_grpc.LLMRunnerStub(channel).stream_model(form()))

    def member(response: llm_pb2.ModelResponse) -> dict[str, Any] | None:
        has = response.HasField("member")
        return {"name": response.member.name, "value": json.loads(response.member.value)} if has else None

    check([(response.text, member(response)) for response in responses])
    assert [response.finish_reason for response in responses if response.finish_reason] == ["eos_token"]
    assert responses[-1].finish_reason


@pytest.mark.parametrize("grammar", [llm_pb2.Grammar(), llm_pb2.Grammar(regex="[0-9]+")])
def test_grpc_refuses_members_of_an_answer_without_them(channel: grpc.Channel, grammar: llm_pb2.Grammar) -> None:
    with pytest.raises(grpc.RpcError, match="json_schema") as refused:
        list(llm_pb2_grpc.LLMRunnerStub(channel).stream_model(form(grammar=grammar)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="stream_model"):
        llm_pb2_grpc.LLMRunnerStub(channel).call_model(form())
