"""Messages between launchers, over real connections."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.nodes import peers
from tgi_server.launcher.nodes.peers import Kind, Link, NodeLost, Peers

Ends = tuple[Link, Link]


@pytest.fixture
async def ends(free_port: Callable[[], int]) -> AsyncIterator[Ends]:
    """The two ends of a connection: node 0's and node 1's."""
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    port = free_port()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(Link("node 1", reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", port):
        there = await Link.connect("node 0", "127.0.0.1", port)
        here = await accepted
        yield here, there
        for link in (here, there):
            await link.close()


async def test_messages_arrive_in_order_and_heartbeats_do_not_show(ends: Ends) -> None:
    here, there = ends
    here.send(Kind.START, port=5)
    here.send(Kind.HEARTBEAT)
    here.send(Kind.STOP)
    kind, message = await there.receive()
    assert (kind, message["port"]) == (Kind.START, 5)
    assert (await there.receive())[0] is Kind.STOP


async def test_a_peer_that_closes_is_lost(ends: Ends) -> None:
    here, there = ends
    await there.close()
    with pytest.raises(NodeLost, match=r"^node 1 (closed its connection|cannot be reached any more)"):
        await here.receive()


async def test_a_peer_that_is_silent_is_lost(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = ends
    there._heartbeat.cancel()
    monkeypatch.setattr(peers, "SILENCE_SECONDS", 1)
    with pytest.raises(NodeLost, match=r"^node 1 has sent nothing for 1 s$"):
        await here.receive()


async def test_a_peer_that_is_no_launcher_is_lost(ends: Ends) -> None:
    here, there = ends
    there._writer.write(b"GET / HTTP/1.1\r\n")
    with pytest.raises(NodeLost, match=r"^node 1 sent no message of a launcher"):
        await here.receive()


async def test_a_failure_of_a_node_is_told_with_its_name(ends: Ends) -> None:
    first, second = Peers([ends[0]], 5, first=True), Peers([ends[1]], 5, first=False)
    second.send_failed("shard-1 was killed by SIGKILL")
    with pytest.raises(ProcessEndedError, match=r"^node 1: shard-1 was killed by SIGKILL$"):
        await first.failure
    await first.close()
    await second.close()


async def test_a_node_passes_on_that_the_server_is_to_stop(ends: Ends) -> None:
    first, second = Peers([ends[0]], 5, first=True), Peers([ends[1]], 5, first=False)
    stopped = asyncio.Event()
    first.on_stop(stopped.set)
    second.send_stop()
    await asyncio.wait_for(stopped.wait(), 5)
    await second.close()
    await first.close()
