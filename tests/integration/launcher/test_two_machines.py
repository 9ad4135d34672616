"""One model over two machines: network namespaces that a virtual cable connects. Needs root."""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.launcher.processes import alive
from tests.logs import assert_no_traceback
from tests.servers import TextGenerationServer
from tests.timing import until
from tgi_server import demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIRST, SECOND, OUTSIDE = "10.213.7.1", "10.213.7.2", "10.213.8.2"
HTTP = "10.213.8.1"
PORT = 8123
READY_SECONDS, END_SECONDS = 120, 10
PROMPT = "### Instruction:\nHow long do I boil an egg?\n\n### Response:\n"


class Machine:
    """A network namespace, and a launcher that runs in it."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *flags: str) -> None:
        command = [sys.executable, "-m", "tgi_server.launcher.cli", f"--model-id={demo_model.PATH}", "--dtype=float32"]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command, "--num-nodes=2", "--prometheus-port=0", *flags],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def shard(self) -> psutil.Process:
        (found,) = (child for child in self.children() if "tgi_server.shard.cli" in child.cmdline())
        return found

    def lines(self) -> str:
        return self.log.read_text()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            assert self.launcher.poll() is None, self.lines()
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.1)


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """The first can be reached from here at HTTP, and by the second at FIRST."""
    tag = uuid.uuid4().hex[:8]
    names = [f"oatmill-{tag}-{each}" for each in range(2)]
    made = [Machine(name, tmp_path / f"{name}.log") for name in names]
    try:
        for name in names:
            ip(f"netns add {name}")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(names)
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        for name in names:
            ip(f"-n {name} link set lo up")
        cable(f"oat{tag}i", names[0], FIRST, names[1], SECOND)
        cable(f"oat{tag}o", names[0], HTTP, None, OUTSIDE)
        yield made[0], made[1]
    finally:
        for machine in made:
            if machine.process is not None and machine.process.poll() is None:
                machine.process.kill()
                machine.process.wait()
        subprocess.run(["ip", "link", "del", f"oat{tag}ob"], check=False, capture_output=True)
        remove(names)
        for machine in made:
            if machine.process is not None:
                assert_no_traceback(machine.lines())


def cable(name: str, one: str, address: str, other: str | None, other_address: str) -> None:
    """other: None for the namespace that the tests run in."""
    ends = [f"{name}{side}" for side in "ab"]
    ip(f"link add {ends[0]} type veth peer name {ends[1]}")
    for end, namespace, own in ((ends[0], one, address), (ends[1], other, other_address)):
        inside = f"-n {namespace} " if namespace else ""
        if namespace:
            ip(f"link set {end} netns {namespace}")
        ip(f"{inside}addr add {own}/24 dev {end}")
        ip(f"{inside}link set {end} up")


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def is_healthy() -> bool:
    try:
        return httpx.get(f"http://{HTTP}:{PORT}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def start(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    second.launch("--node-rank=1", f"--node-address={SECOND}", f"--master-addr={FIRST}")
    first.launch("--node-rank=0", f"--node-address={FIRST}", f"--hostname={HTTP}", f"--port={PORT}")
    first.wait_until(is_healthy)


def generate(**parameters: Any) -> httpx.Response:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 40, **parameters}}
    return httpx.post(f"http://{HTTP}:{PORT}/generate", json=body, timeout=60)


def test_two_machines_write_what_one_writes_and_stop_together(
    machines: tuple[Machine, Machine], demo_server: TextGenerationServer
) -> None:
    first, second = machines
    start(machines)
    assert generate().json() == demo_server.generate(PROMPT, max_new_tokens=40)
    assert re.fullmatch("[0-9]{3}", generate(grammar={"type": "regex", "value": "[0-9]{3}"}).json()["generated_text"])
    assert listening(first) == {FIRST, HTTP}
    assert listening(second) == {SECOND}
    children = [*first.children(), *second.children()]
    second.launcher.terminate()
    assert first.launcher.wait(30) == 0
    assert second.launcher.wait(30) == 0
    until(lambda: not alive(children))


def listening(machine: Machine) -> set[str]:
    """The addresses that something listens on."""
    sockets = subprocess.check_output(["ip", "netns", "exec", machine.name, "ss", "-Hltn"], text=True)
    hosts = (line.split()[3].rpartition(":")[0] for line in sockets.splitlines())
    return {host.removeprefix("[::ffff:").removesuffix("]") for host in hosts}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_shard_that_dies_ends_both_and_is_named(machines: tuple[Machine, Machine], victim: int) -> None:
    start(machines)
    children = [child for machine in machines for child in machine.children()]
    machines[victim].shard().kill()
    killed = time.monotonic()
    for number, machine in enumerate(machines):
        assert machine.launcher.wait(30) == 1
        assert time.monotonic() - killed < END_SECONDS
        where = "" if number == victim else "node 0: " if victim == 0 else f"node 1 ({SECOND}): "
        assert f"launcher: {where}shard-{victim} was killed by SIGKILL" in machine.lines().splitlines()[-1]
    until(lambda: not alive(children))


def test_a_machine_that_vanishes_ends_the_other(machines: tuple[Machine, Machine]) -> None:
    start(machines)
    children = [child for machine in machines for child in machine.children()]
    for line in subprocess.check_output(["ip", "-n", machines[1].name, "-o", "link"], text=True).splitlines():
        name = line.split()[1].partition("@")[0].rstrip(":")
        ip(f"-n {machines[1].name} link set {name} down")
    for machine, other in zip(machines, (f"node 1 ({SECOND})", "node 0"), strict=True):
        assert machine.launcher.wait(30) == 1
        assert f"lost the connection to {other}" in machine.lines().splitlines()[-1]
    until(lambda: not alive(children))


def test_machines_that_do_not_fit_are_told(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    first.launch("--node-rank=0", f"--node-address={FIRST}", f"--hostname={HTTP}", f"--port={PORT}")
    second.launch("--node-rank=1", f"--node-address={SECOND}", f"--master-addr={FIRST}", "--num-shard=2")
    assert second.launcher.wait(30) == 1
    assert second.lines().splitlines()[-1] == (
        "text-generation-launcher: node 0 refused this one: --num-shard is 2 there and 1 on node 0; it must be the same"
    )
    first.wait_until(lambda: f"waiting for node 1 to join at {FIRST}:29500" in first.lines())
    first.launcher.terminate()
    assert first.launcher.wait(10) == 0
