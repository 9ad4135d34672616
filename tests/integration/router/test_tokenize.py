"""/tokenize, /chat_tokenize and /detokenize, in TGI's forms and in vLLM's, and /tokenizer_info."""

from typing import Any

import pytest

from tests.integration.router.conftest import Router, RouterFactory

HELLO = [{"role": "user", "content": "Hello"}]
PIECES = ["<|bos|>", "<|user|>", "Hello", "<|assistant|>"]
TOOL = {"type": "function", "function": {"name": "cook", "parameters": {"type": "object", "properties": {}}}}


async def test_tokens_of_a_prompt(router: Router):
    tokens = (await router.post("/tokenize", inputs="Hello é!")).json()
    assert tokens[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
    assert tokens[1]["text"] == "Hello"
    assert (tokens[-1]["text"], tokens[-1]["start"], tokens[-1]["stop"]) == ("!", 7, 8)
    assert (await router.post("/tokenize", inputs="")).status_code == 422


async def test_tokens_of_a_conversation(router: Router):
    answer = (await router.post("/chat_tokenize", messages=HELLO)).json()
    assert answer["templated_text"] == "<|bos|><|user|>Hello<|assistant|>"
    assert [token["text"] for token in answer["tokenize_response"]] == PIECES


async def test_the_text_of_tokens(router: Router):
    tokens = (await router.post("/tokenize", inputs="Hello é!")).json()
    answer = await router.post("/detokenize", tokens=[token["id"] for token in tokens])
    assert answer.json() == {"prompt": "<|bos|>Hello é!"}
    for tokens in ([10**6], [-1], ["a"]):
        assert (await router.post("/detokenize", tokens=tokens)).status_code == 422


async def test_tokens_of_a_prompt_in_vllms_form(router: Router):
    ids = [token["id"] for token in (await router.post("/tokenize", inputs="Hello é!")).json()]
    most = (await router.http.get("/info")).json()["max_total_tokens"]
    for body, tokens in (
        ({}, ids),
        ({"model": "instant", "add_special_tokens": True, "return_token_strs": False}, ids),
        ({"add_special_tokens": False}, ids[1:]),
    ):
        answer = await router.post("/tokenize", prompt="Hello é!", **body)
        assert answer.json() == {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": None}
        assert (await router.post("/detokenize", model="instant", tokens=tokens)).json()["prompt"].endswith("Hello é!")


async def test_pieces_of_a_prompt_as_the_vocabulary_has_them(router: Router):
    answer = (await router.post("/tokenize", prompt="Hello rice", return_token_strs=True)).json()
    assert answer["token_strs"][:2] == ["<|bos|>", "Hello"]
    assert "".join(answer["token_strs"]) == "<|bos|>HelloĠrice"


async def test_an_empty_prompt_has_the_special_tokens_alone(router: Router):
    assert (await router.post("/tokenize", prompt="", add_special_tokens=False)).json()["tokens"] == []
    assert (await router.post("/tokenize", prompt="")).json()["count"] == 1


async def test_the_name_of_a_special_token_is_that_token(router: Router):
    answer = (await router.post("/tokenize", prompt="<|bos|>", add_special_tokens=False)).json()
    assert answer["tokens"] == [0]


@pytest.mark.parametrize(
    ("body", "pieces"),
    [
        ({}, PIECES),
        ({"model": "instant", "add_generation_prompt": True}, PIECES),
        ({"add_generation_prompt": False, "continue_final_message": False}, PIECES[:-1]),
        ({"add_special_tokens": True}, ["<|bos|>", *PIECES]),
        ({"chat_template_kwargs": {}, "tools": None, "chat_template": None}, PIECES),
    ],
)
async def test_tokens_of_a_conversation_in_vllms_form(router: Router, body: dict[str, Any], pieces: list[str]):
    answer = (await router.post("/tokenize", messages=HELLO, return_token_strs=True, **body)).json()
    assert answer["token_strs"] == pieces
    assert (answer["count"], len(answer["tokens"])) == (len(pieces), len(pieces))
    assert answer["max_model_len"] == router.service.limits.max_total_tokens


async def test_tools_are_part_of_a_conversation(router: Router):
    plain, with_tools = [(await router.post("/tokenize", messages=HELLO, tools=tools)).json() for tools in ([], [TOOL])]
    assert with_tools["count"] > plain["count"]
    shown = (await router.post("/detokenize", tokens=with_tools["tokens"])).json()["prompt"]
    assert '"name": "cook"' in shown
    generated = await router.post("/v1/chat/completions", messages=HELLO, tools=[TOOL], max_tokens=1)
    assert generated.json()["usage"]["prompt_tokens"] == with_tools["count"]


async def test_special_tokens_that_a_message_spells_are_text(router: Router):
    messages = [{"role": "user", "content": "<|bos|>"}]
    answer = (await router.post("/tokenize", messages=messages, add_special_tokens=True, return_token_strs=True)).json()
    assert answer["token_strs"][:3] == ["<|bos|>", "<|bos|>", "<|user|>"]
    assert answer["token_strs"].count("<|bos|>") == 2
    assert "".join(answer["token_strs"][3:-1]) == "<|bos|>"


async def test_the_form_is_that_of_the_field_that_is_sent(router: Router):
    assert isinstance((await router.post("/tokenize", inputs="Hello", prompt=None, messages=None)).json(), list)
    assert isinstance((await router.post("/tokenize", inputs=None, prompt="Hello")).json(), dict)
    for body, said in (
        ({}, "`inputs`, `messages` or `prompt`"),
        ({"prompt": "Hello", "messages": HELLO}, "`prompt`"),
        ({"prompt": 3}, "`prompt`"),
        ({"prompt": ["Hello"]}, "`prompt`"),
        ({"messages": [{"role": "user"}]}, "`messages[0].content`"),
        ({"messages": HELLO, "chat_template": "{{ messages }}"}, "`chat_template`"),
        ({"messages": HELLO, "mm_processor_kwargs": {"size": 8}}, "`mm_processor_kwargs`"),
        ({"messages": HELLO, "return_token_strs": "yes"}, "`return_token_strs`"),
    ):
        response = await router.post("/tokenize", **body)
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")
        assert said in response.json()["error"]
    assert (await router.http.post("/tokenize", content="[]")).status_code == 422


async def test_the_tokenizer_as_evaluations_read_it(router: Router):
    info = (await router.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert {"unk_token", "pad_token", "tokenizer_class"} <= info.keys()
    assert "<|assistant|>" in info["chat_template"]


async def test_the_tokenizer_needs_a_key_as_a_chat_template_may_be_private(routers: RouterFactory):
    router = await routers(api_key="secret")
    for method in ("GET", "HEAD"):
        assert (await router.http.request(method, "/tokenizer_info")).status_code == 401
        allowed = await router.http.request(method, "/tokenizer_info", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200
