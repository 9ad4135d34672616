"""There are no more connections than there may be: those give way that wait for their client."""

import logging
import resource
from dataclasses import dataclass, field
from typing import Any

import pytest

from tgi_server.router.api.connections import Connections, connection_limits
from tgi_server.router.errors import StartupError


@dataclass(eq=False)
class Connection:
    """Stands in for ClientConnection: what Connections asks of one, as the test decides."""

    turn_began: float = 0.0
    receiving: bool = False
    may_give_way: bool = True
    held: int = 0
    broken_off: bool = False
    on_lost: Any = field(default=None)

    def break_off(self) -> None:
        self.broken_off = True
        self.on_lost()


def filled(limit: int, per_address: int, *members: tuple[str, Connection]) -> Connections:
    connections = Connections(limit, per_address)
    for host, connection in members:
        assert connections.fault(host) is None
        connections.add(host, connection)  # type: ignore[arg-type]
    return connections


def test_a_lost_connection_makes_room():
    first = Connection(may_give_way=False)
    connections = filled(1, 1, ("10.0.0.1", first))
    assert len(connections) == 1
    assert connections.fault("10.0.0.2") == "1 connections are open (--max-connections)"
    first.on_lost()
    assert len(connections) == 0
    assert connections.fault("10.0.0.2") is None


def test_the_client_that_was_waited_for_longest_gives_way_first_between_requests():
    in_request = Connection(turn_began=1.0, receiving=True)
    older, newer = Connection(turn_began=2.0), Connection(turn_began=3.0)
    connections = filled(3, 3, *(("10.0.0.1", each) for each in (in_request, newer, older)))
    assert connections.fault("10.0.0.2") is None
    assert (in_request.broken_off, older.broken_off, newer.broken_off) == (False, True, False)


def test_the_address_with_most_connections_gives_way_first():
    alone, one, other = Connection(turn_began=1.0), Connection(turn_began=2.0), Connection(turn_began=3.0)
    connections = filled(3, 2, ("10.0.0.1", alone), ("10.0.0.2", one), ("10.0.0.2", other))
    assert connections.fault("10.0.0.3") is None
    assert (alone.broken_off, one.broken_off, other.broken_off) == (False, True, False)


def test_an_address_has_a_bound_of_its_own_which_others_do_not_feel():
    connections = filled(4, 1, ("10.0.0.1", Connection(may_give_way=False)))
    assert "--max-connections-per-address" in (connections.fault("10.0.0.1") or "")
    assert connections.fault("10.0.0.2") is None


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_of_ipv6_a_whole_network_counts_as_one_address(first: str, second: str, same: bool):
    connections = filled(4, 1, (first, Connection(may_give_way=False)))
    assert (connections.fault(second) is not None) == same


def test_refusals_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture):
    connections = Connections(1, 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            connections.warn("full")
    assert caplog.messages == ["connections are refused: full"]


def test_limits_follow_the_open_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connection_limits(None, None) == (832, 416)
    assert connection_limits(3, None) == (3, 2)
    assert connection_limits(3, 9) == (3, 3)
    with pytest.raises(StartupError, match=r"--max-connections is 833; with 1024 open files there may be 832"):
        connection_limits(833, None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_limits(None, None) == (4096, 2048)


def test_a_connection_that_is_lost_twice_counts_once():
    connection = Connection()
    connections = filled(2, 2, ("10.0.0.1", connection))
    connection.on_lost()
    connection.on_lost()
    assert len(connections) == 0
