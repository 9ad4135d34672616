"""The programs of examples/, as they are, against a server of the demo model with small models beside it."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oatmill.services import is_listening, llm_functionalities
from tests.conftest import FreePort
from tests.fakes.model_server import ModelServer
from tests.integration.llm_functionalities.service import running_service
from tests.servers import TextGenerationServer
from tests.timing import SECONDS, until
from tests.tiny_encoders import make_embedder, make_ranker
from tgi_server import demo_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "voice_assistant.py": ("says: ",),
    "recipes.py": ("cooking", "ingredients="),
    "retrieval.py": ("passage: ", "answer: "),
    "agent.py": ("calls: in_stock(", "answer:"),
    "batch.py": ('{"question": "How long do I boil an egg?", "topic": "', '{"question": "Which tool '),
    "grpc_service.py": ("answer: ", "stream: ", "(eos_token)"),
    "grpc_service.mjs": ("answer: ", "stream: ", "(eos_token)"),
}
ASSISTANT = EXAMPLES / "assistant" / "assistant.py"
PACKAGES = ("@grpc/grpc-js", "@grpc/proto-loader")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(free_port: FreePort, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("examples")
    embedder, ranker = make_embedder("bert", folder / "embedder"), make_ranker("bert", folder / "ranker")
    flags = (f"--model-id={demo_model.PATH}", f"--embedding-model-id={embedder}", f"--rerank-model-id={ranker}")
    server = TextGenerationServer(free_port(), folder / "server.log", *flags)
    try:
        yield server.wait_until_ready().url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def front(url: str, free_port: FreePort) -> Iterator[str]:
    """The address of a gRPC service in front of the server."""
    port = free_port()
    service = llm_functionalities(port, url)
    until(lambda: is_listening(port), 60)
    yield f"127.0.0.1:{port}"
    service.stop()


def command_of(name: str, folder: Path) -> list[str | Path]:
    """Returns the command of an example, whose packages are installed in `folder` if Python has none of them."""
    if name.endswith(".py"):
        return [sys.executable, EXAMPLES / name]
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node.js is not installed")
    if subprocess.run([npm, "install", "--prefix", folder, *PACKAGES], capture_output=True, timeout=200).returncode:
        pytest.skip("there is no package index of Node.js here")
    (folder / "examples").mkdir()
    (folder / "proto").symlink_to(EXAMPLES.parent / "proto")
    return [node, shutil.copy(EXAMPLES / name, folder / "examples")]


def test_each_example_is_tried() -> None:
    programs = [file for file in EXAMPLES.iterdir() if file.suffix in (".py", ".mjs")]
    assert SHOWN.keys() == {file.name for file in programs}
    assert all(len(file.read_text().splitlines()) < 80 for file in programs)


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.timeout(400)
def test_an_example_does_what_it_says(url: str, front: str, name: str, tmp_path: Path) -> None:
    said = "How long do I boil an egg?\nWhich tool do I need to hang a picture?\n"
    given = {"grpc": [front], "batch": []}.get(re.split("[._]", name)[0], [url])
    command = [*command_of(name, tmp_path), *given]
    result = subprocess.run(command, input=said, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    assert all(text in result.stdout for text in SHOWN[name]), result.stdout


@contextmanager
def assistant(service: str, *flags: str) -> Iterator[tuple[Callable[[str], None], list[str]]]:
    """Runs the assistant. Gives a function that says a line to it, and the lines that it has printed."""
    if (python := os.environ.get("OATMILL_PIPECAT_PYTHON")) is None:
        pytest.skip("OATMILL_PIPECAT_PYTHON names no interpreter that has pipecat-ai and grpcio-tools")
    command = [python, ASSISTANT, "--service", service, *flags]
    # The package is the environment's own, and so is everything that it imports.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        write, output, printed = process.stdin, process.stdout, list[str]()
        reader = threading.Thread(target=lambda: printed.extend(line.rstrip() for line in output))
        reader.start()

        def say(line: str) -> None:
            write.write(f"{line}\n")
            write.flush()

        try:
            yield say, printed
            write.close()
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            reader.join()


def choice(*probabilities: float) -> dict[str, Any]:
    """Returns the decision of a model server between search, command and small talk."""
    options = [{"value": str(place), "probability": each} for place, each in enumerate(probabilities)]
    return {"type": "choice", "probabilities": options, "confidence": max(probabilities), "label_mass": 1.0}


@pytest.mark.timeout(400)
def test_an_interruption_cancels_the_generation_and_a_search_is_written_by_the_model() -> None:
    with ModelServer() as server:
        server.answer = lambda prompt: (
            '{"query": "pool hours"}' if "words to search" in prompt else "It is open. " + "And so on it goes. " * 50
        )
        server.decision, server.delay = choice(0.1, 0.1, 0.8), 0.1
        with running_service("--endpoint", server.url) as service, assistant(service.address) as (say, printed):
            say("Tell me a story.")
            until(lambda: "says: It is open." in printed, SECONDS)
            server.decision = choice(0.8, 0.1, 0.1)
            say("When does the pool open?")
            until(lambda: "searches: pool hours" in printed, SECONDS)
            assert server.requests[0].abandoned.wait(SECONDS)
            until(lambda: printed.count("says: It is open.") == 2, SECONDS)
    first = printed.index("interrupted")
    assert printed[first:][:3] == ["interrupted", "decides: search (0.80)", "searches: pool hours"]
    assert [each.path for each in server.requests] == ["/generate_stream", "/generate", "/generate_stream"]
    assert "Results for 'pool hours'" in server.requests[2].prompt
    assert all(0 < int(each.headers["x-envoy-expected-rq-timeout-ms"]) <= 10_200 for each in server.requests)


@pytest.mark.timeout(400)
def test_the_assistant_talks_with_the_demo_model(front: str) -> None:
    with assistant(front, "--deadline", "60") as (say, printed):
        say("How long do I boil an egg?")
        until(lambda: any(line.startswith("answered by: ") for line in printed), SECONDS)
        until(lambda: any(line.startswith("says: ") for line in printed), SECONDS)
    assert len(ASSISTANT.read_text().splitlines()) < 200
