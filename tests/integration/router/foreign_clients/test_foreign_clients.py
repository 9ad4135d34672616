"""Clients, frameworks and suites that others wrote. They come from the package index."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.router.conftest import Router
from tests.integration.router.foreign_clients.environments import Environment
from tests.servers import TextGenerationServer
from tgi_server import demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TEXT = "Rinse the rice. Then boil it."


@pytest.fixture
def environments(pytestconfig: pytest.Config) -> Path:
    folder = pytestconfig.rootpath / ".pytest_cache" / "client-environments"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def test_langchain(router: Router, environments: Path):
    result = await Environment(environments / "langchain", ["langchain-huggingface"]).ask(
        "langchain_script.py", router.url
    )
    assert result["text"] == result["asynchronous"] == result["chat"] == TEXT
    assert "".join(result["stream"]).startswith(TEXT)
    assert result["stopped"].startswith("Rinse the r")
    for error in (result["error"], result["stream_error"]):
        assert error.startswith("ValidationError")
        assert "temperature" in error
    assert TEXT.startswith(result["left"])
    await router.idle()


async def test_text_generation(router: Router, environments: Path):
    # It wants a huggingface_hub from before 1.0, and little of it.
    environment = Environment(
        environments / "text-generation",
        ["--no-deps", "text-generation"],
        ["aiohttp", "pydantic", "requests", "huggingface_hub<1"],
    )
    result = await environment.ask("text_generation_script.py", router.url)
    assert result["text"] == result["chat"] == TEXT
    assert "".join(result["stream"]) == TEXT + "<|eos|>"
    assert result["asynchronous"] == [TEXT, TEXT + "<|eos|>"]
    assert (result["finish_reason"], result["prefill"]) == ("eos_token", "<|bos|>")
    assert (result["others"], result["top_tokens"]) == (1, 2)
    for error in (result["error"], result["stream_error"]):
        assert error.startswith("ValidationError")
        assert "max_new_tokens" in error
    assert TEXT.startswith(result["left"])
    await router.idle()


async def test_lm_eval(demo_server: TextGenerationServer, environments: Path):
    """Its numbers are those of `transformers` in float32."""
    environment = Environment(environments / "lm-eval", ["lm_eval[api]", "transformers"])
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_model.PATH)
    pairs = [("How long do I boil an egg?", f" For {count} minutes.") for count in (6, 12, 900)]
    texts = ["Rinse the rice. Then boil it in twice as much water.", "A pan, an egg and a little butter. " * 12]
    asked = {"pairs": pairs, "texts": texts, "prompts": ["How do I boil eggs?\n", "Rinse the"]}
    result = await environment.ask("lm_eval_script.py", demo_server.url, str(demo_model.PATH), asked=asked)

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    for (context, continuation), (told, greedy) in zip(pairs, result["likelihood"], strict=True):
        ids = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        start = len(tokenizer(context, add_special_tokens=False)["input_ids"])
        every = logprobs(ids)[start - 1 :]
        following = torch.tensor(ids[start:])
        assert told == pytest.approx(every.gather(1, following[:, None]).sum().item(), abs=1e-3)
        assert greedy is bool((every.argmax(-1) == following).all())
    for text, told in zip(texts, result["rolling"], strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 60:
            every = logprobs([tokenizer.bos_token_id, *ids])
            assert told == pytest.approx(every.gather(1, torch.tensor(ids)[:, None]).sum().item(), abs=1e-3)
        assert told < 0
    for prompt, told in zip(asked["prompts"], result["generated"], strict=True):
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert told == tokenizer.decode(made, skip_special_tokens=True).split("\n\n")[0]


@pytest.mark.parametrize(
    "packages",
    [
        ["instructor"],
        ["langchain-openai"],
        ["litellm", "mcp"],
        ["llama-index-llms-openai-like"],
        ["openai-agents"],
        ["pydantic-ai-slim[openai]"],
    ],
    ids=" ".join,
)
async def test_frameworks_get_calls_of_tools(router: Router, environments: Path, packages: list[str]):
    router.say('{"name": "Rice", "arguments": {"minutes": 12}}')
    environment = Environment(environments / packages[0].partition("[")[0], packages)
    assert await environment.ask("frameworks_script.py", router.url, packages[0]) == {"minutes": 12}


async def test_outlines(demo_server: TextGenerationServer, environments: Path):
    """Its types come out as they are asked for, whichever server it takes this one for."""
    environment = Environment(environments / "outlines", ["outlines[openai]", "huggingface_hub"])
    result = await environment.ask("outlines_script.py", demo_server.url)
    forms = {"integer": "[+-]?(0|[1-9][0-9]*)", "choice": "eggs|rice", "regex": "[0-9]{1,3} minutes"}
    for server in ("tgi", "vllm", "sglang"):
        for name, form in forms.items():
            assert re.fullmatch(form, result[server][name]), (server, name)
    objects = [result[server]["object"] for server in ("tgi", "vllm", "sglang", "openai")]
    # A stream of TGI has the token that ends it.
    for text in (*objects, result["stream"].removesuffix("<|eos|>"), *result["asynchronous"]):
        told = json.loads(text)
        assert 1 <= told["minutes"] <= 99
        assert told["kind"] in ("brown", "white")
    assert result["grammar"] in ("boil eggs", "boil rice")
    assert result["plain"]


async def test_schemathesis(router: Router, environments: Path, tmp_path: Path):
    """Whatever is sent, nothing but what the API's description allows comes back, and never a 5xx."""
    environment = Environment(environments / "schemathesis", ["schemathesis"])
    checks = [
        *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
        *("response_headers_conformance", "unsupported_method", "missing_required_header", "negative_data_rejection"),
    ]
    report, config = tmp_path / "report.json", tmp_path / "schemathesis.toml"
    # By itself it takes it for accepted when a list that is too long makes the body too large (413).
    config.write_text('[checks.negative_data_rejection]\nexpected-statuses = ["4xx"]\n')
    _, output = await environment.run(
        "schemathesis",
        *(f"--config-file={config}", "run", f"{router.url}/openapi.json", "--max-time=300", "--no-color"),
        *("--suppress-health-check=all", "--report=json", f"--report-json-path={report}"),
        f"--checks={','.join(checks)}",
    )
    result = json.loads(report.read_text())
    # It takes the schema of an event stream for that of an event's envelope; TGI's document, and so ours, means data.
    failures = [failure for failure in result["failures"] if "SSE event" not in failure["title"]]
    assert failures == [], output
    assert result["errors"] == [], output
    assert (await router.post("/generate", inputs="Hello")).status_code == 200
