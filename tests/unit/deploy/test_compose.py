"""docker-compose.yml: what its containers may do, and the key that they share."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_functionalities.settings import Settings as FrontSettings
from shared.settings import read_settings
from tests.unit.deploy.conftest import COMPOSE
from tgi_server.launcher.settings import LauncherSettings

DOCKER = COMPOSE.parent / "deploy" / "docker"

Services = dict[str, Any]


def test_no_container_has_capabilities_or_gains_privileges(services: Services) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


@pytest.mark.parametrize("name", ["tgi", "llm_functionalities"])
def test_a_service_writes_to_a_folder_of_limited_size_only(services: Services, name: str) -> None:
    assert services[name]["read_only"] is True
    (tmp,) = services[name]["tmpfs"]
    path, _, options = tmp.partition(":")
    assert path == "/tmp"
    assert "size=" in options


def test_triton_keeps_its_kernels_where_it_may_write_and_run_them(services: Services) -> None:
    (tmp,) = services["tgi"]["tmpfs"]
    path, _, options = tmp.partition(":")
    assert f"TRITON_HOME={path}" in (DOCKER / "tgi.Dockerfile").read_text().split()
    assert "TRITON_HOME" not in services["tgi"]["environment"]
    assert "exec" in options.split(",")


def test_with_gpus_triton_keeps_its_kernels_for_the_next_start(services: Services, entrypoint, tmp_path: Path) -> None:
    gpu = yaml.safe_load((COMPOSE.parent / "docker-compose.gpu.yml").read_text())["services"]["tgi"]
    home = gpu["environment"]["TRITON_HOME"]
    assert home in {volume.split(":")[1] for volume in services["tgi"]["volumes"]}
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text(
        '#!/bin/sh\necho "$TRITON_HOME" "$HUMMING_CACHE_DIR" "$FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" '
        '"$FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"\n'
    )
    for given, used in ((str(tmp_path), str(tmp_path)), ("/absent", "/tmp")):
        folders = entrypoint(TRITON_HOME=given)[0].split()
        assert folders == [used, f"{used}/.humming", "1", f"{used}/.flash_attention"]
    assert entrypoint(TRITON_HOME="/absent", HUMMING_CACHE_DIR="/kept")[0].split()[1] == "/kept"


def test_the_image_for_gpus_has_the_libraries_for_them(services: Services) -> None:
    gpu = yaml.safe_load((COMPOSE.parent / "docker-compose.gpu.yml").read_text())["services"]["tgi"]
    extras = gpu["build"]["args"]["EXTRAS"].split()
    arguments = [sys.executable, "-m", "tools.requirements", *extras]
    printed = subprocess.run(arguments, cwd=COMPOSE.parent, capture_output=True, text=True, check=True).stdout
    names = {re.match(r"[\w.-]+", line).group() for line in printed.splitlines()}  # type: ignore[union-attr]
    assert {"humming-kernels", "flash-attn-4", "transformers"} <= names
    assert "EXTRAS" not in services["tgi"]["build"]["args"]


def test_gpus_are_requested_with_them_alone(services: Services) -> None:
    gpu = yaml.safe_load((COMPOSE.parent / "docker-compose.gpu.yml").read_text())["services"]["tgi"]
    assert services["tgi"]["environment"]["GPU_COUNT"] == "${GPU_COUNT:-}"
    (reserved,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["environment"]["GPU_COUNT"] == reserved["count"] == "${GPU_COUNT:-1}"


def test_what_cannot_start_is_not_started_for_ever(services: Services) -> None:
    for name in ("tgi", "llm_functionalities"):
        policy, _, most = services[name]["restart"].partition(":")
        assert policy == "on-failure"
        assert int(most) > 0


def test_torch_comes_without_cuda_unless_there_are_gpus(services: Services) -> None:
    gpu = yaml.safe_load((COMPOSE.parent / "docker-compose.gpu.yml").read_text())["services"]
    for name in ("tgi", "tester"):
        assert services[name]["build"]["args"]["TORCH"].endswith("/whl/cpu}")
    assert "cpu" not in gpu["tgi"]["build"]["args"]["TORCH"]
    assert gpu["tgi"]["image"] != services["tgi"]["image"]


def test_the_tester_has_shared_memory_and_a_process_that_adopts_orphans(services: Services) -> None:
    assert services["tester"]["shm_size"] == "1gb"
    assert services["tester"]["init"] is True


@pytest.fixture
def entrypoint(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the container's entrypoint with a launcher that prints its settings: port, shards, flags."""
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text('#!/bin/sh\necho "$PORT ${NUM_SHARD:-} $*"\n')
    launcher.chmod(0o755)

    def run(*flags: str, **environment: str) -> list[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        result = subprocess.run(
            ["sh", str(DOCKER / "tgi-entrypoint.sh"), *flags],
            env={"PATH": path, "HUGGINGFACE_HUB_CACHE": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return [result.stdout.rstrip("\n"), result.stderr]

    return run


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "80 1 "),
        ({"GPU_COUNT": "2"}, "80 2 "),
        ({"GPU_COUNT": "1", "NUM_SHARD": "4", "PORT": "8080"}, "8080 4 "),
        ({"GPU_COUNT": "1", "NUM_SHARD": ""}, "80 1 "),
        ({"GPU_COUNT": "1", "SHARDED": "true"}, "80  "),
        ({"TGI_PARAMS": "--dtype float32  --port 81"}, "80 1 --dtype float32 --port 81"),
    ],
)
def test_variables_win_over_the_defaults_of_a_container(entrypoint, environment: dict[str, str], settings: str) -> None:
    assert entrypoint(**environment) == [settings, ""]
    assert entrypoint("--env", **environment)[0].split() == [*settings.split(), "--env"]


def test_a_folder_that_cannot_be_written_to_is_named_with_the_command_that_helps(entrypoint) -> None:
    settings, warning = entrypoint(HUGGINGFACE_HUB_CACHE="/absent")
    assert settings == "80 1 "
    assert f"sudo chown -R {os.getuid()}:{os.getgid()} shared/file_system/downloads/tgi" in warning


def test_one_variable_is_the_key_of_both_services(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    # A variable without a value is passed on as it is: unset, empty, or with its value.
    assert services["tgi"]["environment"]["API_KEY"] is None
    assert services["llm_functionalities"]["environment"]["ENDPOINT_TOKEN"] == "${API_KEY:-}"
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("ENDPOINT_TOKEN", "secret")
    assert read_settings(LauncherSettings, "launcher", []).api_key == "secret"
    assert read_settings(FrontSettings, "llm-functionalities", []).endpoint_token == "secret"


def test_the_page_lists_the_variables_of_compose() -> None:
    files = [COMPOSE, COMPOSE.parent / "docker-compose.gpu.yml"]
    used = {name for file in files for name in re.findall(r"(?<!\$)\$\{(\w+)", file.read_text())}
    page = (COMPOSE.parent / "deploy" / "README.md").read_text()
    (table,) = re.findall(r"\| variable \|.*\n\|.*\n((?:\|.*\n)+)", page)
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == used


def test_models_are_fetched_before_the_server_that_loads_them_starts(services: Services) -> None:
    assert services["tgi"]["depends_on"] == {"download": {"condition": "service_completed_successfully"}}
    download = services["download"]
    assert "profiles" not in download
    assert download["command"] == "${DOWNLOAD:-}"
    (folder,) = (volume.partition(":")[0] for volume in download["volumes"] if volume.endswith("/tgi/local"))
    assert any(volume == f"{folder}:/models:ro" for volume in services["tgi"]["volumes"])
