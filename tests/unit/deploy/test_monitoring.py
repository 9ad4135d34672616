"""Every series that Prometheus is to fetch and Grafana is to show exists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from llm_functionalities.metrics import ServiceMetrics
from llm_functionalities.settings import Settings as FrontSettings
from shared.settings import read_settings
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.metrics import Metrics as RouterMetrics

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "monitoring"
NAME = re.compile(r"\b(?:tgi|llm_functionalities|process)_\w+")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """The series of both services, those without labels and those whose labels have had no value yet."""
    text = RouterMetrics().expose().decode() + generate_latest(ServiceMetrics().registry).decode()
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana/dashboards/oatmill.json").read_text())
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_what_the_dashboard_shows_is_measured(expression: str, exposed: set[str]) -> None:
    names = set(NAME.findall(expression))
    assert names
    assert names <= exposed


def rules() -> list[dict[str, Any]]:
    return [rule for group in read(FOLDER / "alerts.yml")["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_what_alerts_watch_is_measured(rule: dict[str, Any], exposed: set[str]) -> None:
    names = set(NAME.findall(rule["expr"]))
    assert names or rule["expr"].startswith("up{")
    assert names <= exposed
    assert rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_the_dashboard_asks_the_source_and_the_instances_that_are_chosen() -> None:
    (source,) = read(FOLDER / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert (variables["datasource"]["query"], source["type"]) == ("prometheus", "prometheus")
    assert source["isDefault"]
    assert variables["instance"]["datasource"]["uid"] == "${datasource}"
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {"${datasource}"}
    for expression in expressions():
        assert len(NAME.findall(expression)) == expression.count('instance=~"$instance"'), expression


def test_prometheus_reads_the_alerts_from_where_they_are_mounted(services: dict[str, Any]) -> None:
    (name,) = read(FOLDER / "prometheus.yml")["rule_files"]
    assert f"./deploy/monitoring/{name}:/etc/prometheus/{name}:ro" in services["prometheus"]["volumes"]


def test_prometheus_fetches_from_services_that_listen_there(services: dict[str, Any]) -> None:
    targets = {
        target
        for job in read(FOLDER / "prometheus.yml")["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    tgi_port = services["tgi"]["ports"][0].rsplit(":", 1)[1]
    metrics_port = services["llm_functionalities"]["environment"]["METRICS_PORT"]
    assert targets == {f"tgi:{tgi_port}", f"llm_functionalities:{metrics_port}"}


def test_what_compose_mounts_is_there_and_is_where_it_is_looked_for(services: dict[str, Any]) -> None:
    mounted = {}
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source, target, _ = volume.split(":")
            assert (ROOT / source).exists(), source
            mounted[target] = source
    (provider,) = read(FOLDER / "grafana/provisioning/dashboards/oatmill.yml")["providers"]
    assert mounted[provider["options"]["path"]].endswith("monitoring/grafana/dashboards")
    (source,) = read(FOLDER / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in services
    assert any(published.endswith(f":{port}") for published in services[host]["ports"])


def test_one_variable_of_compose_turns_on_the_traces_of_all_services(services: dict[str, Any]) -> None:
    for name, settings in (("tgi", LauncherSettings), ("llm_functionalities", FrontSettings)):
        assert services[name]["environment"]["OTLP_ENDPOINT"] == "${OTLP_ENDPOINT:-}"
        assert "otlp_endpoint" in settings.model_fields


def test_an_empty_variable_turns_no_traces_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTLP_ENDPOINT", "")
    assert read_settings(LauncherSettings, "launcher", []).otlp_endpoint is None
    assert read_settings(FrontSettings, "llm-functionalities", []).otlp_endpoint is None
