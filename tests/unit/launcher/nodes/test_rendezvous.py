"""Launchers that find each other, over loopback."""

import asyncio
from collections.abc import Callable

import pytest

from shared.settings import read_settings
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.nodes.rendezvous import rendezvous
from tgi_server.launcher.settings import LauncherSettings


def node(rank: int, port: int, nodes: int = 3) -> LauncherSettings:
    flags = [f"--num-nodes={nodes}", f"--node-rank={rank}", f"--master-port={port}", "--master-addr=127.0.0.1"]
    return read_settings(LauncherSettings, "launcher", [*flags, "--node-address=127.0.0.1"])


async def test_all_nodes_learn_one_port(free_port: Callable[[], int]) -> None:
    port = free_port()
    peers = await asyncio.gather(*(rendezvous(node(rank, port), 2) for rank in (2, 0, 1)))
    assert len({each.store_port for each in peers}) == 1
    assert [each.first for each in peers] == [False, True, False]
    for each in peers:
        await each.close()


@pytest.mark.parametrize(
    ("rank", "nodes", "shards", "reason"),
    [
        (1, 3, 4, "--num-shard is 4 there and 2 on node 0; it must be the same"),
        (1, 2, 2, "--num-nodes is 2 there and 3 on node 0; it must be the same"),
        (2, 3, 2, "there is a node with --node-rank 2 already"),
    ],
)
async def test_a_node_that_does_not_fit_is_refused_and_the_others_go_on(
    free_port: Callable[[], int], caplog: pytest.LogCaptureFixture, rank: int, nodes: int, shards: int, reason: str
) -> None:
    caplog.set_level("INFO")
    port = free_port()
    first = asyncio.create_task(rendezvous(node(0, port), 2))
    second = asyncio.create_task(rendezvous(node(2, port), 2))
    for _ in range(600):
        if "node 2 (127.0.0.1) has joined" in caplog.messages:
            break
        await asyncio.sleep(0.05)
    with pytest.raises(CannotStartError, match=reason):
        await rendezvous(node(rank, port, nodes), shards)
    third = await rendezvous(node(1, port), 2)
    for each in (await first, await second, third):
        await each.close()
