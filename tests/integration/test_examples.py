"""The programs of examples/, as they are, against a server of the demo model with small models beside it."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oatmill.services import is_listening, llm_functionalities
from tests.conftest import FreePort
from tests.servers import TextGenerationServer
from tests.timing import until
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
