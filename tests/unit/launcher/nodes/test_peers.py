"""Messages between launchers that have met."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.unit.launcher.nodes.test_rendezvous import node
from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.nodes.peers import Peers
from tgi_server.launcher.nodes.rendezvous import rendezvous

Nodes = tuple[Peers, Peers]


@pytest.fixture
async def nodes(free_port: Callable[[], int]) -> AsyncIterator[Nodes]:
    """Nodes 0 and 1."""
    port = free_port()
    first, second = await asyncio.gather(*(rendezvous(node(rank, port, nodes=2), 1) for rank in (0, 1)))
    yield first, second
    await second.close()
    await first.close()


async def test_a_failure_of_a_node_is_told_with_its_name(nodes: Nodes) -> None:
    first, second = nodes
    second.send_failed("shard-1 was killed by SIGKILL")
    with pytest.raises(ProcessEndedError, match=r"^node 1 \(127\.0\.0\.1\): shard-1 was killed by SIGKILL$"):
        await asyncio.wait_for(first.failure, 5)
    first.send_failed("node 2 (10.0.0.3): shard-2 was killed by SIGKILL")
    with pytest.raises(ProcessEndedError, match=r"^node 2 \(10\.0\.0\.3\): shard-2 was killed by SIGKILL$"):
        await asyncio.wait_for(second.failure, 5)


async def test_a_node_passes_on_that_the_server_is_to_stop(nodes: Nodes) -> None:
    first, second = nodes
    stopped = asyncio.Event()
    first.on_stop(stopped.set)
    second.send_stop()
    await asyncio.wait_for(stopped.wait(), 5)


async def test_the_last_message_arrives_although_its_sender_ends(nodes: Nodes) -> None:
    first, second = nodes
    stopped = asyncio.Event()
    second.on_stop(stopped.set)
    first.send_stop()
    await first.close()
    await asyncio.wait_for(stopped.wait(), 5)
    assert not second.failure.done()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_node_that_ends_is_lost(nodes: Nodes, rank: int) -> None:
    await nodes[rank].close()
    with pytest.raises(ProcessEndedError) as lost:
        await asyncio.wait_for(nodes[1 - rank].failure, 5)
    assert str(lost.value) == f"lost the connection to {('node 0', 'node 1 (127.0.0.1)')[rank]}"


async def test_a_stop_before_the_server_has_started_is_a_failure(nodes: Nodes) -> None:
    first, second = nodes
    second.send_stop()
    with pytest.raises(ProcessEndedError, match="another node was stopped while the server started"):
        await asyncio.wait_for(first.failure, 5)
