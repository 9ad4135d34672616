"""LangChain, TGI's own client, and schemathesis, against the router. They come from the package index."""

import json
from pathlib import Path

import pytest

from tests.integration.router.conftest import Router
from tests.integration.router.foreign_clients.environments import Environment

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


async def test_schemathesis(router: Router, environments: Path, tmp_path: Path):
    """Whatever is sent, nothing but what the API's description allows comes back, and never a 5xx."""
    environment = Environment(environments / "schemathesis", ["schemathesis"])
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    report = tmp_path / "report.json"
    _, output = await environment.run(
        "schemathesis",
        *("run", f"{router.url}/openapi.json", "--max-examples=10", f"--checks={checks}", "--no-color"),
        *("--suppress-health-check=all", "--report=json", f"--report-json-path={report}"),
    )
    result = json.loads(report.read_text())
    # It takes the schema of an event stream for that of an event's envelope; TGI's document, and so ours, means data.
    failures = [failure for failure in result["failures"] if "SSE event" not in failure["title"]]
    assert failures == [], output
    assert result["errors"] == [], output
    assert (await router.post("/generate", inputs="Hello")).status_code == 200
