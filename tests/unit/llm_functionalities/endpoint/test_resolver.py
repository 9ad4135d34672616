"""Host names, against a name server of our own on loopback."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llm_functionalities.endpoint.call import Call, Deadline
from llm_functionalities.endpoint.resolver import Resolver
from llm_functionalities.errors import DeadlineExceeded, Unresolvable
from tests.fakes.name_server import NameServer
from tests.timing import on_a_busy_machine, until

RECORDS = {
    "model.example.": [("A", "192.0.2.1"), ("A", "192.0.2.2"), ("AAAA", "2001:db8::1")],
    "six.example.": [("AAAA", "2001:db8::6")],
    "alias.example.": [("CNAME", "other.example.")],
    "other.example.": [("CNAME", "model.example.")],
    "loop.example.": [("CNAME", "loop.example.")],
    "tgi.cluster.local.": [("A", "192.0.2.9")],
    "tgi.": [("A", "192.0.2.8")],
    "mail.example.": [],
}
BOUND = 0.4


@pytest.fixture
def server() -> Iterator[NameServer]:
    with NameServer(dict(RECORDS)) as server:
        yield server


class Machine:
    """The files in which a resolver finds the names that a machine knows."""

    def __init__(self, folder: Path) -> None:
        self.hosts = folder / "hosts"
        self.resolv_conf = folder / "resolv.conf"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.resolv_conf.write_text("nameserver 127.0.0.1\n")

    def resolver(self, *servers: tuple[str, int]) -> Resolver:
        return Resolver(BOUND, servers=list(servers) or None, hosts_file=self.hosts, resolv_conf=self.resolv_conf)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def call(seconds: float = 5) -> Call:
    return Call(Deadline.after(seconds))


@pytest.mark.parametrize("literal", ["192.0.2.7", "2001:db8::7", "::1", "fe80::1%lo"])
def test_an_address_is_its_own_and_nobody_is_asked(literal: str, machine: Machine, server: NameServer) -> None:
    assert machine.resolver(server.address).resolve(literal, call()) == [literal]
    assert not server.asked


@pytest.mark.parametrize(
    ("hosts", "name", "addresses"),
    [
        ("127.0.0.1 localhost\n::1 localhost ip6-localhost", "localhost", ["127.0.0.1", "::1"]),
        ("", "localhost", ["127.0.0.1", "::1"]),
        ("", "LocalHost.", ["127.0.0.1", "::1"]),
        ("", "model.localhost", ["127.0.0.1", "::1"]),
        ("192.0.2.3 model.example Model2 # comment\nnonsense\n", "MODEL2", ["192.0.2.3"]),
        ("#192.0.2.3 tgi\n192.0.2.4\ttgi  gpu", "tgi", ["192.0.2.4"]),
        ("2001:db8::5 model.example", "model.example", ["2001:db8::5"]),
    ],
)
def test_the_machine_knows_some_names_itself(
    hosts: str, name: str, addresses: list[str], machine: Machine, server: NameServer
) -> None:
    machine.hosts.write_text(hosts)
    assert machine.resolver(server.address).resolve(name, call()) == addresses
    assert not server.asked


@pytest.mark.parametrize(
    ("name", "addresses"),
    [
        ("model.example", ["192.0.2.1", "192.0.2.2"]),
        ("Model.Example.", ["192.0.2.1", "192.0.2.2"]),
        ("six.example", ["2001:db8::6"]),
        ("alias.example", ["192.0.2.1", "192.0.2.2"]),
    ],
)
def test_names_of_the_name_server(name: str, addresses: list[str], machine: Machine, server: NameServer) -> None:
    assert machine.resolver(server.address).resolve(name, call()) == addresses


@pytest.mark.parametrize("name", ["absent.example", "mail.example", "loop.example", "x" * 64 + ".example", "a..b"])
def test_a_name_without_an_address_is_unresolvable(name: str, machine: Machine, server: NameServer) -> None:
    with pytest.raises(Unresolvable):
        machine.resolver(server.address).resolve(name, call())


def test_an_alias_is_followed_when_the_server_only_names_it(machine: Machine, server: NameServer) -> None:
    server.mode = "bare_alias"
    assert machine.resolver(server.address).resolve("alias.example", call()) == ["192.0.2.1", "192.0.2.2"]


def test_an_answer_too_long_for_a_datagram_comes_over_tcp(machine: Machine, server: NameServer) -> None:
    server.mode = "truncate"
    assert machine.resolver(server.address).resolve("model.example", call()) == ["192.0.2.1", "192.0.2.2"]


@pytest.mark.parametrize(
    ("resolv_conf", "name", "address"),
    [
        ("search svc.local cluster.local", "tgi", "192.0.2.9"),
        ("domain cluster.local", "tgi", "192.0.2.9"),
        ("search cluster.local", "tgi.", "192.0.2.8"),
        ("search cluster.local\noptions ndots:0", "tgi", "192.0.2.8"),  # what Docker's resolver is asked
        ("search cluster.local\noptions ndots:5", "model.example", "192.0.2.1"),
    ],
)
def test_search_domains(resolv_conf: str, name: str, address: str, machine: Machine, server: NameServer) -> None:
    machine.resolv_conf.write_text(f"nameserver 127.0.0.1\n{resolv_conf}\n")
    assert machine.resolver(server.address).resolve(name, call())[0] == address


@pytest.mark.parametrize("mode", ["silent", "garbage"])
@on_a_busy_machine
def test_a_resolver_that_gives_no_answer_costs_its_bound_and_no_more(
    mode: str, machine: Machine, server: NameServer
) -> None:
    server.mode = mode
    started = time.monotonic()
    with pytest.raises(Unresolvable, match="does not answer"):
        machine.resolver(server.address).resolve("model.example", call())
    assert BOUND * 0.9 < time.monotonic() - started < BOUND + 0.1


@on_a_busy_machine
def test_a_failing_server_is_no_reason_to_wait(machine: Machine, server: NameServer) -> None:
    server.mode = "servfail"
    started = time.monotonic()
    with pytest.raises(Unresolvable, match="SERVFAIL"):
        machine.resolver(server.address).resolve("model.example", call())
    assert time.monotonic() - started < BOUND / 2


def test_a_second_server_answers_when_the_first_does_not(machine: Machine, server: NameServer) -> None:
    with NameServer(RECORDS) as silent:
        silent.mode = "silent"
        resolver = machine.resolver(silent.address, server.address)
        assert resolver.resolve("model.example", call()) == ["192.0.2.1", "192.0.2.2"]


@pytest.mark.parametrize("content", ["", "# nothing\n", "nameserver nonsense\n", None])
@on_a_busy_machine
def test_without_any_resolver_names_are_unresolvable_at_once(content: str | None, machine: Machine) -> None:
    if content is None:
        machine.resolv_conf.unlink(missing_ok=True)
    else:
        machine.resolv_conf.write_text(content)
    started = time.monotonic()
    with pytest.raises(Unresolvable, match="no name server"):
        machine.resolver().resolve("model.example", call())
    assert time.monotonic() - started < 0.1
    assert machine.resolver().resolve("localhost", call()) == ["127.0.0.1"]


def test_a_resolver_that_appears_is_used_without_a_restart(machine: Machine, server: NameServer) -> None:
    resolver = machine.resolver(server.address)
    server.mode = "silent"
    with pytest.raises(Unresolvable):
        resolver.resolve("model.example", call())
    server.mode = "answer"
    assert resolver.resolve("model.example", call()) == ["192.0.2.1", "192.0.2.2"]


def test_an_answer_is_remembered_until_it_is_forgotten(machine: Machine, server: NameServer) -> None:
    resolver = machine.resolver(server.address)
    for _ in range(3):
        resolver.resolve("model.example", call())
    assert server.asked == ["model.example. A"]
    resolver.forget("model.example")
    resolver.resolve("model.example", call())
    assert server.asked == ["model.example. A"] * 2


def test_an_address_that_failed_comes_last_while_it_is_remembered(machine: Machine, server: NameServer) -> None:
    resolver = machine.resolver(server.address)
    resolver.put_last("model.example", "192.0.2.1")
    assert resolver.resolve("model.example", call()) == ["192.0.2.1", "192.0.2.2"]
    for failed, first in (("192.0.2.1", "192.0.2.2"), ("192.0.2.2", "192.0.2.1"), ("192.0.2.9", "192.0.2.1")):
        resolver.put_last("model.example", failed)
        assert resolver.resolve("model.example", call())[0] == first
    assert server.asked == ["model.example. A"]


@on_a_busy_machine
def test_one_look_up_serves_all_who_wait_for_it(machine: Machine, server: NameServer) -> None:
    resolver = machine.resolver(server.address)
    server.mode = "silent"
    server.asked.clear()
    started = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        outcomes = [threads.submit(resolver.resolve, "model.example", call()) for _ in range(16)]
    assert all(isinstance(outcome.exception(), Unresolvable) for outcome in outcomes)
    assert time.monotonic() - started < BOUND + 0.2
    assert len(server.asked) == 2


@on_a_busy_machine
def test_who_waits_for_somebody_elses_look_up_waits_no_longer_than_its_own_time(
    machine: Machine, server: NameServer
) -> None:
    resolver = machine.resolver(server.address)
    server.mode = "silent"
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(resolver.resolve, "model.example", call())
        time.sleep(0.1)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            resolver.resolve("model.example", call(0.1))
        assert time.monotonic() - started < 0.2
    assert isinstance(first.exception(), Unresolvable)


@pytest.fixture
def soon_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are not remembered, except while no name server answers."""
    monkeypatch.setattr("llm_functionalities.endpoint.resolver.LONGEST_MEMORY_SECONDS", 0.0)


@pytest.mark.usefixtures("soon_stale")
@pytest.mark.parametrize("mode", ["silent", "servfail", pytest.param("garbage", marks=pytest.mark.slow)])
def test_addresses_from_before_are_used_while_no_name_server_answers(
    mode: str, machine: Machine, server: NameServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llm_functionalities.endpoint.resolver.STALE_RETRY_SECONDS", 0.2)
    resolver = machine.resolver(server.address)
    before = resolver.resolve("model.example", call())
    server.mode = mode
    assert resolver.resolve("model.example", call()) == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "using the last known addresses of model.example: model.example: name server 127.0.0.1" in caplog.text
    server.mode = "answer"
    server.records["model.example."] = [("A", "192.0.2.77")]
    until(lambda: resolver.resolve("model.example", call()) == ["192.0.2.77"])


@pytest.mark.usefixtures("soon_stale")
def test_a_name_server_that_does_not_answer_is_not_asked_for_each_call(machine: Machine, server: NameServer) -> None:
    resolver = machine.resolver(server.address)
    before = resolver.resolve("model.example", call())
    server.mode = "servfail"
    assert resolver.resolve("model.example", call()) == before
    asked = len(server.asked)
    for _ in range(10):
        assert resolver.resolve("model.example", call()) == before
    assert len(server.asked) == asked


@pytest.mark.usefixtures("soon_stale")
def test_an_address_is_not_used_once_the_name_is_gone(machine: Machine, server: NameServer) -> None:
    resolver = machine.resolver(server.address)
    resolver.resolve("model.example", call())
    del server.records["model.example."]
    with pytest.raises(Unresolvable, match="no such host"):
        resolver.resolve("model.example", call())
    server.mode = "servfail"
    with pytest.raises(Unresolvable, match="SERVFAIL"):
        resolver.resolve("model.example", call())


@pytest.mark.usefixtures("soon_stale")
def test_an_address_is_not_used_for_ever(machine: Machine, server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_functionalities.endpoint.resolver.STALE_SECONDS", 0.0)
    resolver = machine.resolver(server.address)
    resolver.resolve("model.example", call())
    server.mode = "servfail"
    with pytest.raises(Unresolvable, match="SERVFAIL"):
        resolver.resolve("model.example", call())
