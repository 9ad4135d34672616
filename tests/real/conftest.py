"""Skips the files of this folder as wholes unless `--real` is given, and starts servers of the trained models."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import FreePort
from tests.servers import TextGenerationServer
from tests.skipped import skipped_file

FOLDER = Path(__file__).parent
# Of what servers write for a model: its folder, and its weights as the kernels read them.
CACHE = FOLDER.parents[1] / "runs" / "real_cache"
START_SECONDS = 600.0
RealServers = Callable[..., TextGenerationServer]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if parent.config.getoption("real"):
        return None
    return skipped_file(parent, module_path, "all of tests/real: trained models; make real")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of this folder time for loading a model."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.timeout(2 * START_SECONDS))


@pytest.fixture(scope="session")
def real_server(free_port: FreePort, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServers]:
    """Returns the server of a model with some flags. It is started when it is first asked for, and serves all tests.

    real_server("qwen", "--dtype=float32")
    real_server("minilm", flag="--embedding-model-id")
    """
    from tests.real.models import model_path

    folder = tmp_path_factory.mktemp("real")
    running: dict[tuple[str, ...], TextGenerationServer] = {}

    def start(name: str, *flags: str, flag: str = "--model-id") -> TextGenerationServer:
        if (name, *flags) not in running:
            running[name, *flags] = TextGenerationServer(
                free_port(),
                folder / f"{name}-{len(running)}.log",
                f"{flag}={model_path(name)}",
                *flags,
                environment={"OMP_NUM_THREADS": "2", "HF_HUB_CACHE": str(CACHE), "PACKED_WEIGHTS_CACHE": str(CACHE)},
            )
        server = running[name, *flags]
        server.wait_until(server.is_healthy, START_SECONDS)
        return server

    yield start
    for server in running.values():
        server.stop()


@pytest.fixture(params=["qwen", "gemma"])
def served(request: pytest.FixtureRequest, real_server: RealServers) -> tuple[str, TextGenerationServer]:
    """Returns the name of a GGUF file's model, and a server of it with default settings."""
    return request.param, real_server(request.param, "--max-total-tokens=4096")


@pytest.fixture
def qwen_server(real_server: RealServers) -> TextGenerationServer:
    return real_server("qwen", "--max-total-tokens=4096")


@pytest.fixture
def gemma_server(real_server: RealServers) -> TextGenerationServer:
    return real_server("gemma", "--max-total-tokens=4096")
