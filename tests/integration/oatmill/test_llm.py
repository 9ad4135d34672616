"""`oatmill.LLM` beside a running server: the same tokens and log-probabilities, in every form of a call."""

import ast
import asyncio
import json
import logging
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers  # as a whole: `LLM` would import the parts that serving needs, for all tests of this process

from oatmill import LLM, InvalidInput, LLMError, Result
from tests.conftest import FreePort
from tests.gguf_encoders import write_embedder
from tests.servers import TextGenerationServer
from tests.tiny_encoders import make_embedder
from tgi_server import demo_model
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.settings import RequestSettings, ServingSettings
from tgi_server.shard.settings import ModelSettings

ROOT = Path(__file__).parents[3]
PROMPTS = ["How do I boil an egg?", "### Instruction:\nWhat is a chisel for?\n\n### Response:\n", "Rinse", "Once upon"]
QUESTION = [{"role": "user", "content": "Is there a hammer in stock?"}]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
TOOL = {
    "type": "function",
    "function": {
        "name": "in_stock",
        "parameters": {
            "type": "object",
            "properties": {"tool": {"type": "string", "maxLength": 12}},
            "required": ["tool"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"minutes": {"type": "integer", "minimum": 1, "maximum": 20}, "hot": {"type": "boolean"}},
    "required": ["minutes", "hot"],
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder("bert", tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def server(free_port: FreePort, tmp_path_factory: pytest.TempPathFactory, embedder: Path) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = TextGenerationServer(
        free_port(), log, f"--model-id={demo_model.PATH}", f"--embedding-model-id={embedder}"
    )
    try:
        with httpx.Client(base_url=running.wait_until_ready().url, timeout=60) as client:
            yield client
    finally:
        running.stop()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model.PATH, max_total_tokens=512) as made:
        yield made


@torch.inference_mode()
def reference_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Returns what `transformers` computes of each text alone: the mean of its tokens' states, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows)).numpy()


def asked(server: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, json=body | {"return_token_ids": True})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def assert_same(result: Result, answer: dict[str, Any]) -> None:
    (choice,) = answer["choices"]
    assert result.token_ids == choice["token_ids"]
    assert result.logprobs == choice["logprobs"]
    assert result.finish_reason == choice["finish_reason"]
    assert result.prompt_token_ids == answer.get("prompt_token_ids", choice.get("prompt_token_ids"))
    assert result.usage.prompt_tokens == answer["usage"]["prompt_tokens"] == len(result.prompt_token_ids)
    assert result.usage.completion_tokens == answer["usage"]["completion_tokens"] == len(result.token_ids)
    message = choice.get("message", {"content": choice.get("text")})
    assert result.text == (message["content"] or "")
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert [call["function"] for call in result.tool_calls] == functions


@pytest.mark.parametrize("options", [{"temperature": 0}, SAMPLED], ids=["greedy", "seeded"])
def test_completions_are_those_of_the_server(llm: LLM, server: httpx.Client, options: dict[str, Any]):
    options = options | {"max_tokens": 24, "logprobs": 3}
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, **options), strict=True):
        assert_same(result, asked(server, "/v1/completions", prompt=prompt, **options))


@pytest.mark.parametrize("options", [{"temperature": 0}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("form", ["plain", "tool", "schema"])
def test_chats_are_those_of_the_server(llm: LLM, server: httpx.Client, options: dict[str, Any], form: str):
    options = options | {"max_tokens": 48, "logprobs": True, "top_logprobs": 2}
    mine: dict[str, Any] = {
        "plain": {},
        "tool": {"tools": [TOOL], "tool_choice": "required"},
        "schema": {"schema": SCHEMA},
    }
    theirs = mine | {"schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}}
    result = llm.chat(QUESTION, **mine[form], **options)
    assert_same(result, asked(server, "/v1/chat/completions", messages=QUESTION, **theirs[form], **options))
    if form == "tool":
        assert result.finish_reason == "tool_calls"
        assert result.tool_calls[0]["function"]["name"] == "in_stock"
        assert result.message["tool_calls"] == result.tool_calls
    if form == "schema":
        assert json.loads(result.text).keys() == {"minutes", "hot"}


def test_a_class_of_pydantic_is_a_schema(llm: LLM):
    from pydantic import BaseModel

    class Egg(BaseModel):
        soft: bool

    assert Egg.model_validate_json(llm.chat(QUESTION, schema=Egg, max_tokens=20).text)


def test_constraints_that_are_left_to_the_model_are_named(llm: LLM):
    with pytest.warns(UserWarning, match="left to the model: .*uniqueItems"):
        llm.chat(QUESTION, schema={"type": "array", "uniqueItems": True}, max_tokens=3)


def test_many_prompts_come_back_in_their_order(llm: LLM, capsys: pytest.CaptureFixture[str]):
    prompts = [f"{number} eggs and {number % 7} spoons" for number in range(300)]
    results = llm.generate(prompts, temperature=0, max_tokens=4)
    assert [result.prompt_token_ids for result in results] == [
        llm.generate(each, max_tokens=1).prompt_token_ids for each in prompts
    ]
    assert results[123].token_ids == llm.generate(prompts[123], temperature=0, max_tokens=4).token_ids
    assert not capsys.readouterr().err  # the bar is for terminals


def test_conversations_come_back_in_their_order(llm: LLM):
    conversations = [[{"role": "user", "content": f"{number} eggs"}] for number in range(9)]
    results = llm.chat(conversations, max_tokens=2, n=2)
    assert all(len(result.choices) == 2 for result in results)
    alone = [llm.chat(each, max_tokens=1).prompt_token_ids for each in conversations]
    assert [result.prompt_token_ids for result in results] == alone


def test_prompts_may_be_tokens(llm: LLM):
    ids = llm.generate(PROMPTS[0], max_tokens=1).prompt_token_ids
    assert llm.generate(ids, temperature=0, max_tokens=5).prompt_token_ids == ids
    assert [each.prompt_token_ids for each in llm.generate([ids, ids[:2]], max_tokens=1)] == [ids, ids[:2]]
    assert llm.generate([]) == []


def test_prompts_that_were_computed_are_not_computed_again(llm: LLM):
    long = "Rinse the rice and boil it. " * 40
    llm.generate(long, max_tokens=1)
    assert llm.generate(long, max_tokens=1).usage.cached_tokens >= 128


@pytest.mark.parametrize("given", [PROMPTS[1], QUESTION], ids=["prompt", "chat"])
def test_pieces_of_a_stream_are_the_whole(llm: LLM, given: Any):
    options = SAMPLED | {"max_tokens": 16}
    whole = (llm.generate if isinstance(given, str) else llm.chat)(given, **options)
    pieces = list(llm.stream(given, **options))
    assert len(pieces) > 4
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert pieces[0].prompt_token_ids == whole.prompt_token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert (pieces[-1].finish_reason, pieces[-1].usage) == (whole.finish_reason, whole.usage)


def test_a_stream_that_nobody_reads_further_ends(llm: LLM):
    stream = llm.stream(PROMPTS[0], max_tokens=400, ignore_eos=True)
    next(stream)
    stream.close()
    assert llm.generate(PROMPTS[0], max_tokens=2).token_ids


def test_embeddings_are_those_of_the_server(server: httpx.Client, embedder: Path):
    texts = [f"{number} eggs" for number in range(150)]
    answer = server.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()
    theirs = [np.frombuffer(b64decode(each["embedding"]), np.float32) for each in answer["data"]]
    with LLM(embedder) as llm:
        values = llm.embed(texts)
        np.testing.assert_allclose(values, reference_vectors(embedder, texts), atol=1e-4)
        np.testing.assert_allclose(values, theirs, atol=1e-6)  # batches of other lengths
        assert llm.embed(texts[0]).shape == (48,)
        assert llm.embed(texts[:3], dimensions=8).shape == (3, 8)
        assert llm.embed([]).shape[0] == 0
        with pytest.raises(InvalidInput, match="does not generate"):
            llm.generate("Hello")


def test_a_gguf_file_of_an_embedding_model_is_recognized(tmp_path: Path):
    file, folder = write_embedder("bert", tmp_path, "Q8_0")
    texts = ["the lazy egg", "Eggs!"]
    with LLM(file) as llm:
        np.testing.assert_allclose(llm.embed(texts), reference_vectors(folder, texts), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"temperatur": 1}, "`temperatur` is not a field of this request; did you mean `temperature`?"),
        ({"temperature": -1}, "`temperature` is -1; it must be at least 0"),
        ({"stop": [""]}, "`stop` must not have an empty stop sequence"),
        ({"stream": True}, "`stream` is not an option here"),
        ({"schema": "{"}, "schema"),
        ({"schema": {}, "response_format": {"type": "text"}}, "cannot be combined"),
    ],
)
def test_wrong_options_are_named(llm: LLM, options: dict[str, Any], fault: str, caplog: pytest.LogCaptureFixture):
    with pytest.raises(InvalidInput) as caught:
        llm.chat(QUESTION, **options)
    assert fault in str(caught.value)
    with pytest.raises(ValueError, match=r".+"):
        list(llm.stream(QUESTION, **options))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_prompt_that_is_wrong_is_named(llm: LLM):
    with pytest.raises(InvalidInput, match=r"number 2: .*maximum context length"):
        llm.generate(["a", "b", "egg " * 2_000, "c"], max_tokens=1)
    with pytest.raises(LLMError, match="embedding"):
        llm.embed("Hello")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"max_total_token": 100}, "there is no setting `max_total_token`; did you mean `max_total_tokens`?"),
        ({"max_model_len": 100}, "there is no setting `max_model_len`; use `max_total_tokens`"),
        ({"max_total_tokens": -1}, "max_total_tokens|MAX_TOTAL_TOKENS"),
        ({"port": 80}, "`port` is a setting of servers"),
        ({"weights_cache_override": "/x"}, "not supported"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], fault: str):
    with pytest.raises(InvalidInput, match=fault.replace("?", r"\?")):
        LLM(demo_model.PATH, **settings)


def read_names(*sources: Path, but: Collection[str] = ()) -> set[str]:
    """Returns the names of the settings that the functions of some files read. but: functions that are left out."""
    found = set()
    for source in sources:
        for part in ast.parse(source.read_text()).body:
            for node in ast.walk(part) if getattr(part, "name", "") not in but else ():
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "settings":
                    found.add(node.attr)
    return found


def test_each_setting_of_the_launcher_is_taken_or_refused(tmp_path: Path):
    """A setting is taken because the pipeline or the shard reads it, which another test of types ensures."""
    taken = set()
    for name in LauncherSettings.model_fields.keys() - {"model_id"}:
        with pytest.raises(LLMError) as caught:
            LLM(tmp_path / "absent", **{name: LauncherSettings.model_fields[name].default})
        if not isinstance(caught.value, InvalidInput):
            assert "absent" in str(caught.value)
            taken.add(name)
        else:
            assert f"`{name}` is a setting of servers" in str(caught.value)
    router = read_names(ROOT / "tgi_server/router/startup.py", but=("run", "access_rules", "_policy"))
    pipeline = RequestSettings.model_fields.keys()
    assert pipeline <= taken
    assert "prefix_disk" in router  # read from prefix_cache_disk
    assert pipeline - {"max_priority", "prefix_cache_disk", "explain_misses"} <= router
    shard = read_names(ROOT / "tgi_server/shard/server.py", ROOT / "oatmill/pipeline.py")
    of_shards = ModelSettings.model_fields.keys() - ServingSettings.model_fields.keys()
    assert taken == pipeline | of_shards
    assert of_shards - {"rope_scaling", "rope_factor", "embedding_model_id", "rerank_model_id"} <= shard
    assert not taken & {"port", "api_key", "num_shard", "json_output", "otlp_endpoint", "payload_limit"}


def test_models_that_are_not_there(tmp_path: Path):
    with pytest.raises(LLMError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(LLMError, match="absent"):
        LLM(tmp_path / "absent")


def test_threads_and_running_event_loops(llm: LLM):
    options = {"temperature": 0, "max_tokens": 12}
    alone = [llm.generate(prompt, **options).token_ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def generate(number: int) -> None:
        found[number] = llm.generate(PROMPTS[number], **options).token_ids

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(PROMPTS))] == alone

    async def notebook() -> list[int]:
        return llm.generate(PROMPTS[0], **options).token_ids

    assert asyncio.run(notebook()) == alone[0]


def test_closing():
    llm = LLM()
    stream = llm.stream(PROMPTS[0], max_tokens=2_000, ignore_eos=True)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(LLMError):
        list(stream)
    with pytest.raises(RuntimeError, match="the LLM is closed"):
        llm.generate("Hello")


def test_a_script_listens_nowhere_and_ends_by_itself():
    script = (
        "import sys; from oatmill import LLM; assert 'torch' not in sys.modules and 'pydantic' in sys.modules\n"
        "llm = LLM(); print(len(llm.generate('Hello', max_tokens=3, temperature=0).token_ids))\n"
        "import psutil; print([each for each in psutil.Process().net_connections('all') if each.status == 'LISTEN'])\n"
        "from transformers.utils import is_torch_distributed_available as whole; assert whole()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stdout) == (0, "3\n[]\n"), result.stderr
    assert not result.stderr


def test_importing_the_package_is_light():
    heavy = ("torch", "pydantic", "grpc", "starlette")
    code = f"import sys, oatmill; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
