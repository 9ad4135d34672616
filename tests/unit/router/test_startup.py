"""The parts of a router are put together from its settings and from what the shards tell."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.instant_shard import InstantShard, start
from tgi_server import demo_model
from tgi_server.router.errors import StartupError
from tgi_server.router.settings import RouterSettings
from tgi_server.router.startup import access_rules, assembled


def settings(path: Path, **values: Any) -> RouterSettings:
    usual = {"tokenizer_name": demo_model.PATH, "master_shard_uds_path": str(path)}
    return RouterSettings.model_validate(usual | values)


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    """The socket of a shard of at most 256 tokens for a prompt and its answer."""
    path = tmp_path / "shard"
    shards = await start(InstantShard(f"unix://{path}", None, max_total_tokens=256, grammars=False), path)
    yield path
    await shards.stop(None)


async def test_limits_that_are_not_set_follow_the_shards(path: Path):
    async with assembled(settings(path, max_concurrent_requests=7)) as service:
        limits = service.limits
        assert (limits.max_total_tokens, limits.max_input_tokens, limits.max_batch_size) == (256, 255, 7)
        assert (service.model.model_id, service.model.compute_type) == ("instant", "cpu")
        await service.check_health()


async def test_limits_that_are_set_are_kept(path: Path):
    values = {"max_total_tokens": 100, "max_input_tokens": 60, "max_batch_size": 3, "model_id": "maker/name"}
    async with assembled(settings(path, **values)) as service:
        limits = service.limits
        assert (limits.max_total_tokens, limits.max_input_tokens, limits.max_batch_size) == (100, 60, 3)
        assert service.model.model_id == "maker/name"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_total_tokens": 257}, "--max-total-tokens is 257; the model and the memory allow at most 256"),
        ({"max_input_tokens": 256}, "--max-input-tokens is 256; it must be less than the 256 tokens"),
    ],
)
async def test_limits_that_the_shards_cannot_keep_are_named(path: Path, values: dict[str, int], told: str):
    with pytest.raises(StartupError) as error:
        async with assembled(settings(path, **values)):
            pass
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("address", "values", "hosts", "keys"),
    [
        ("127.0.0.1", {}, {"127.0.0.1"}, []),
        ("127.0.0.1", {"allowed_hosts": ["tgi"]}, {"127.0.0.1", "tgi"}, []),
        ("0.0.0.0", {}, None, []),
        ("127.0.0.1", {"api_key": "s3cret"}, None, ["s3cret"]),
    ],
)
def test_a_server_on_loopback_without_a_key_answers_only_to_its_own_names(
    tmp_path: Path, address: str, values: dict[str, Any], hosts: set[str] | None, keys: list[str]
):
    with socket.create_server((address, 0)) as listener:
        rules = access_rules(settings(tmp_path, hostname=address, **values), listener)
    assert list(rules.keys) == keys
    if not keys:
        assert (None if rules.hosts is None else set(rules.hosts)) == hosts
