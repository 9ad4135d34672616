"""Shared by all tests: the option --runslow, a watch over logs, model folders, and servers on free ports."""

import fcntl
import gc
import logging
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from llm_functionalities.settings import Settings as FrontSettings
from tests.logs import Tracebacks
from tests.schedule import FilesTogether
from tests.servers import TextGenerationServer
from tgi_server import demo_model
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.shard.settings import DownloadSettings, ShardSettings

FreePort = Callable[[], int]
ServerFactory = Callable[..., TextGenerationServer]

# Several processes of tests share the cores: a thread of torch that waits must not keep a core busy. Read when torch is
# imported, so nothing that this module imports may import torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Processes are started from this one while gRPC's threads run in it, and gRPC's handling of forks, meant for children
# that go on to use it, may leave such a child hanging or break it. Read when gRPC is first used.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A client of HTTP reads the certificates of all authorities when it is made, or only as it needs them, from a folder.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = "/etc/ssl/certs"

# Variables that the programs read, such as those of a container image. Tests set what they mean.
for program in (LauncherSettings, ShardSettings, DownloadSettings, FrontSettings):
    for setting in program.model_fields:
        os.environ.pop(setting.upper(), None)
# Servers read the checkpoint that a test has made, unless the test says otherwise.
os.environ["PACKED_WEIGHTS_CACHE"] = "none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run the tests that take long, too")
    parser.addoption("--real", action="store_true", help="run tests/real, which needs trained models")
    parser.addoption("--full", action="store_true", help="measure all perplexities of tests/real, on 20,000 tokens")
    parser.addoption("--agents", action="store_true", help="run tests/agents, which fetches agents and runs them")
    parser.addoption("--soak-minutes", type=float, default=10.0, help="how long test_soak.py loads both services")
    parser.addoption("--conservation-calls", type=int, default=1_000, help="how many test_conservation.py makes")
    parser.addoption("--conservation-seed", type=int, default=0, help="what decides them; 0: another one each time")


def pytest_configure(config: pytest.Config) -> None:
    """Has hypothesis make few examples, unless the slow tests run too."""
    # An example may take as long as it likes: on a busy machine any may be held up.
    for name, examples in (("quick", 20), ("thorough", 100)):
        settings.register_profile(
            name, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile("thorough" if config.getoption("--runslow") else "quick")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the CPU kernels, if that has not been done, before a test waits for them that may not take so long.

    The process that only hands out tests to others leaves it to them: torch takes seconds to import.
    """
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        from tgi_server.engine.kernels import load_kernels

        with Path(__file__).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # or else each of the processes would compile them
            load_kernels()


SLOW = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the slow tests out, unless they were asked for, and counts them."""
    if config.getoption("--runslow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]  # or of a class, or a module
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    config.stash[SLOW] = len(slow)
    if hasattr(config, "workeroutput"):
        config.workeroutput["slow"] = len(slow)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """Every process of a run collects the same tests."""
    node.config.stash[SLOW] = getattr(node, "workeroutput", {}).get("slow", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints a table of what was not checked, and of how to check it."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    if slow := config.stash.get(SLOW, 0):
        reasons["slow: make test ARGS=--runslow"] = slow
    if reasons:
        terminalreporter.section("not checked here")
    for reason, number in reasons.most_common():
        terminalreporter.line(f"{number:6}  {reason}")


def pytest_collection_finish() -> None:
    """Spares the garbage collector what all modules hold: going through it again and again takes a tenth of a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_traceback_is_logged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails tests during which this process logs a traceback, unless they are marked as `logs_tracebacks`."""
    seen = Tracebacks()
    logging.getLogger().addHandler(seen)
    yield
    logging.getLogger().removeHandler(seen)
    if not request.node.get_closest_marker("logs_tracebacks"):
        assert not seen.lines, "\n".join(seen.lines)


@pytest.fixture(scope="session")
def free_port() -> FreePort:
    """Returns free ports of 127.0.0.1, another one at each call, and in each process that runs tests.

    They are below the ports that the system gives to connections, which could take one before a server does.
    """
    given: set[int] = set()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

    def find() -> int:
        while True:
            port = random.SystemRandom().randrange(10_000 + worker, 32_000, workers)
            if port in given:
                continue
            given.add(port)
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port

    return find


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights. Not to be written to."""
    from tests.tiny_models import make_llama  # imports torch, which takes seconds

    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def server(free_port: FreePort, tmp_path: Path) -> Iterator[ServerFactory]:
    """Starts `text-generation-launcher` with the flags it is given; what is still running is stopped afterwards.

    server("--model-id=FOLDER", "--dtype=float32", environment={"LOG_LEVEL": "debug"}).wait_until_ready()
    """
    started: list[TextGenerationServer] = []
    numbers = count()

    def start(*flags: str, environment: dict[str, str] | None = None) -> TextGenerationServer:
        log = tmp_path / f"server-{next(numbers)}.log"
        started.append(TextGenerationServer(free_port(), log, *flags, environment=environment))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture(scope="session")
def demo_server(free_port: FreePort, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextGenerationServer]:
    """One server of the bundled demo model in float32, for all tests that only ask it something."""
    log = tmp_path_factory.mktemp("demo_server") / "server.log"
    running = TextGenerationServer(free_port(), log, f"--model-id={demo_model.PATH}", "--dtype=float32")
    try:
        yield running.wait_until_ready()
    finally:
        status = running.stop()
    assert status == 0
