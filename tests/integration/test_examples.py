"""The programs of examples/, as they are, against a server of the demo model with small models beside it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import FreePort
from tests.servers import TextGenerationServer
from tests.tiny_encoders import make_embedder, make_ranker
from tgi_server import demo_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "voice_assistant.py": ("says: ",),
    "recipes.py": ("cooking", "ingredients="),
    "retrieval.py": ("passage: ", "answer: "),
    "agent.py": ("calls: in_stock(", "answer:"),
}

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


def test_each_example_is_tried() -> None:
    assert SHOWN.keys() == {file.name for file in EXAMPLES.glob("*.py")}
    assert all(len(file.read_text().splitlines()) < 80 for file in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_does_what_it_says(url: str, name: str) -> None:
    said = "How long do I boil an egg?\nWhich tool do I need to hang a picture?\n"
    command = [sys.executable, EXAMPLES / name, url]
    result = subprocess.run(command, input=said, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    assert all(text in result.stdout for text in SHOWN[name]), result.stdout
