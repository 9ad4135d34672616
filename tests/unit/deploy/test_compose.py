"""docker-compose.yml: what its containers may do, and the key that they share."""

from typing import Any

import pytest

from llm_functionalities.settings import Settings as FrontSettings
from shared.settings import read_settings
from tgi_server.launcher.settings import LauncherSettings

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
    assert services["tgi"]["environment"]["TRITON_HOME"] == path
    assert "exec" in options.split(",")


def test_one_variable_is_the_key_of_both_services(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    # A variable without a value is passed on as it is: unset, empty, or with its value.
    assert services["tgi"]["environment"]["API_KEY"] is None
    assert services["llm_functionalities"]["environment"]["ENDPOINT_TOKEN"] == "${API_KEY:-}"
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("ENDPOINT_TOKEN", "secret")
    assert read_settings(LauncherSettings, "launcher", []).api_key == "secret"
    assert read_settings(FrontSettings, "llm-functionalities", []).endpoint_token == "secret"


def test_models_are_fetched_before_the_server_that_loads_them_starts(services: Services) -> None:
    assert services["tgi"]["depends_on"] == {"download": {"condition": "service_completed_successfully"}}
    download = services["download"]
    assert "profiles" not in download
    assert download["command"] == "${DOWNLOAD:-}"
    (folder,) = (volume.partition(":")[0] for volume in download["volumes"] if volume.endswith("/tgi/local"))
    assert any(volume == f"{folder}:/models:ro" for volume in services["tgi"]["volumes"])
