"""The parts of a router are put together from its settings and from what the shards tell."""

import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.instant_shard import InstantShard, start
from tgi_server import demo_model
from tgi_server.router.errors import StartupError
from tgi_server.router.settings import ApiKey, RouterSettings
from tgi_server.router.startup import access_rules, assembled, public_name


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


def test_no_name_of_a_model_is_a_path(tmp_path: Path):
    snapshot = tmp_path / "models--acme--small" / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    assert public_name("acme/small") == "acme/small"
    assert public_name(str(snapshot)) == "acme/small"
    assert public_name(str(tmp_path / "my-llama")) == "my-llama"
    assert public_name(f"{tmp_path}/my-llama/") == "my-llama"
    assert public_name(str(demo_model.PATH)) == "oatmill-demo"
    (tmp_path / "sha256-6a0746a1ec1a").touch()  # as Ollama and the hub's cache store files
    (tmp_path / "model-Q4_K_M.gguf").symlink_to(tmp_path / "sha256-6a0746a1ec1a")
    assert public_name(str(tmp_path / "model-Q4_K_M.gguf")) == "model-Q4_K_M.gguf"


async def test_the_folder_of_a_model_names_it_and_its_path_is_understood(path: Path):
    async with assembled(settings(path, model_id="/models/my-llama")) as service:
        assert (service.model.model_id, service.model.names) == ("my-llama", ["my-llama"])
        assert service.model.is_named("/models/my-llama")
        assert service.model.is_named("my-llama")


async def test_shards_that_choose_nothing_get_what_tgi_has(path: Path):
    async with assembled(settings(path)) as service:
        limits = service.limits
        assert (limits.max_batch_size, limits.max_batch_prefill_tokens, limits.max_concurrent_requests) == (
            128,
            4096,
            128,
        )


async def test_limits_that_are_not_set_follow_the_shards(path: Path):
    async with assembled(settings(path, max_concurrent_requests=7)) as service:
        limits = service.limits
        assert (limits.max_total_tokens, limits.max_input_tokens, limits.max_batch_size) == (256, 255, 7)
        assert (service.model.model_id, service.model.compute_type) == ("instant", "cpu")
        await service.check_health()


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ({}, (416, 8192, 416)),
        ({"max_batch_prefill_tokens": 1000}, (416, 1000, 416)),
        ({"max_concurrent_requests": 50}, (50, 8192, 50)),
        ({"max_batch_size": 20}, (20, 8192, 128)),
        ({"max_batch_size": 200, "max_concurrent_requests": 50}, (200, 8192, 50)),
    ],
)
async def test_a_batch_and_a_step_are_as_large_as_the_shards_choose(
    tmp_path: Path, values: dict[str, int], limits: tuple[int, int, int]
):
    path = tmp_path / "gpu"
    shards = await start(InstantShard(f"unix://{path}", None, grammars=False, chosen=(416, 8192)), path)
    async with assembled(settings(path, **values)) as service:
        chosen = service.limits
        assert (chosen.max_batch_size, chosen.max_batch_prefill_tokens, chosen.max_concurrent_requests) == limits
    await shards.stop(None)


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


async def start_of(tmp_path: Path, positions: int, room: int) -> tuple[Path, Any]:
    """Starts a shard of a model of so many positions, with room for so many tokens of one sequence."""
    path = tmp_path / "another"
    shard = InstantShard(
        f"unix://{path}", None, max_total_tokens=room, max_position_embeddings=positions, grammars=False
    )
    return path, await start(shard, path)


async def test_a_context_that_is_longer_than_the_models_needs_a_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, shards = await start_of(tmp_path, positions=2048, room=1_000_000)
    with pytest.raises(StartupError) as error:
        async with assembled(settings(path, max_total_tokens=1_000_000)):
            pass
    told = "--max-total-tokens is 1000000, but the model supports 2048 positions; lower it, or add --allow-long-con"
    assert str(error.value).startswith(told)
    async with assembled(settings(path, max_total_tokens=1_000_000, allow_long_context=True)) as service:
        assert service.limits.max_total_tokens == 1_000_000
    assert "--max-total-tokens is 1000000, but the model supports 2048 positions" in caplog.text
    await shards.stop(None)


@pytest.mark.parametrize(
    ("values", "cause"),
    [({"max_batch_total_tokens": 100}, "--max-batch-total-tokens"), ({}, "the memory for the KV cache")],
)
async def test_a_context_that_is_shorter_than_the_models_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict[str, int], cause: str
):
    path, shards = await start_of(tmp_path, positions=2048, room=128)
    async with assembled(settings(path, **values)):
        pass
    assert "prompt and answer may have 128 tokens together; the model supports 2048, but " + cause in caplog.text
    await shards.stop(None)


async def test_a_model_without_a_chat_template_is_logged(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "model"
    shutil.copytree(demo_model.PATH, folder)
    async with assembled(settings(path, tokenizer_name=folder)):
        pass
    assert "no chat template" not in caplog.text
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    async with assembled(settings(path, tokenizer_name=folder)):
        pass
    assert "the model has no chat template, so chats are refused; --tokenizer-config-path can give one" in caplog.text


async def test_adapters_are_there_from_the_start(path: Path):
    async with assembled(settings(path, lora_adapters="chef=/adapters/chef,diy=/adapters/diy")) as service:
        assert [(each.id, each.folder, each.rank) for each in service.adapters] == [
            ("chef", "/adapters/chef", 8),
            ("diy", "/adapters/diy", 8),
        ]
        assert service.policy.adapter_root is None


@pytest.mark.parametrize(
    ("adapters", "told"),
    [
        ("chef=/adapters/broken", "--lora-adapters: chef: tensor x has the shape [2]"),
        ("instant=/adapters/chef", "--lora-adapters: 'instant' is a name of the model itself; choose another id"),
        ("chef=maker/chef", "--lora-adapters: there is no folder maker/chef; the launcher fetches adapters"),
    ],
)
async def test_adapters_that_cannot_be_served_end_the_start(path: Path, adapters: str, told: str):
    with pytest.raises(StartupError) as error:
        async with assembled(settings(path, lora_adapters=adapters)):
            pass
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("address", "values", "names"),
    [
        ("127.0.0.1", {}, {"127.0.0.1"}),
        ("0.0.0.0", {"allowed_hosts": ["TGI.example.", "*.models.example"]}, {"tgi.example", "*.models.example"}),
    ],
)
def test_a_server_knows_its_names_and_whether_others_reach_it(
    tmp_path: Path, address: str, values: dict[str, Any], names: set[str]
):
    with socket.create_server((address, 0)) as listener:
        rules = access_rules(settings(tmp_path, hostname=address, **values), listener)
    assert set(rules.hosts) == names | {address, socket.gethostname().lower()}
    assert rules.only_here == (address == "127.0.0.1")


def test_with_a_key_the_key_decides(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert access_rules(settings(tmp_path, api_key="s3cret"), listener).keys == [ApiKey("s3cret")]
