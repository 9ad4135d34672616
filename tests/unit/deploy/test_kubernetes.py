"""The manifests in deploy/kubernetes: by the schemas of Kubernetes, and against what the servers really are."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from llm_functionalities.settings import Settings as FrontSettings
from shared.settings import ServiceSettings, read_settings
from tgi_server.launcher.processes.supervisor import ABORT_SECONDS, SHARD_SECONDS
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling.health import HEALTH_SECONDS
from tools.helm import TEMPLATES, templates

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
# The oldest and the newest Kubernetes that the manifests are for.
VERSIONS = ("1.29", "1.37")

Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    files = [file for file in sorted((FOLDER / "gpu").glob("*.yaml")) if file.name != "kustomization.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def the(kind: str, name: str) -> Manifest:
    (found,) = (each for each in manifests() if name_of(each) == f"{kind}-{name}")
    return found


WORKLOADS = [the("StatefulSet", "tgi"), the("Deployment", "llm-functionalities")]


def pod_of(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def container_of(workload: Manifest) -> Manifest:
    (container,) = pod_of(workload)["containers"]
    return container


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", manifests(), ids=name_of)
def test_kubernetes_knows_every_field(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_field_that_is_misspelt_would_be_found() -> None:
    manifest = deepcopy(the("StatefulSet", "tgi"))
    container_of(manifest)["readynessProbe"] = container_of(manifest).pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")
@pytest.mark.parametrize("variant", ["gpu", "cpu"])
def test_kustomize_makes_valid_manifests(variant: str) -> None:
    result = subprocess.run(["kubectl", "kustomize", FOLDER / variant], capture_output=True, text=True, check=True)
    made = {name_of(manifest): manifest for manifest in yaml.safe_load_all(result.stdout)}
    assert made.keys() == {name_of(manifest) for manifest in manifests()}
    for manifest in made.values():
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    tgi = made["StatefulSet-tgi"]
    assert container_of(tgi)["image"] == "registry.example/oatmill-tgi:0.1.0"
    assert ("nvidia.com/gpu" in container_of(tgi)["resources"]["limits"]) == (variant == "gpu")


def read(settings: type[ServiceSettings], workload: Manifest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the settings that the container's program makes of its arguments and variables."""
    container = container_of(workload)
    for variable in container["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
        others = ("HF_", "TRITON_", "GPU_")
        assert variable["name"].lower() in settings.model_fields or variable["name"].startswith(others)
    return read_settings(settings, "program", container["args"])


def test_the_launcher_takes_what_it_is_given_and_has_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = the("StatefulSet", "tgi")
    settings = read(LauncherSettings, workload, monkeypatch)
    assert settings.port == port_of(workload, "http")
    assert settings.num_shard == int(container_of(workload)["resources"]["limits"]["nvidia.com/gpu"])
    ending = settings.graceful_termination_timeout + ABORT_SECONDS + SHARD_SECONDS
    assert pod_of(workload)["terminationGracePeriodSeconds"] > pause_before_the_end(workload) + ending


def test_the_front_service_takes_what_it_is_given_and_has_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = the("Deployment", "llm-functionalities")
    settings = read(FrontSettings, workload, monkeypatch)
    assert (settings.port, settings.metrics_port) == (port_of(workload, "grpc"), port_of(workload, "metrics"))
    assert pod_of(workload)["terminationGracePeriodSeconds"] > pause_before_the_end(workload) + settings.grace + 4


def pause_before_the_end(workload: Manifest) -> float:
    command, seconds = container_of(workload)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return float(seconds)


def port_of(workload: Manifest, name: str) -> int:
    (port,) = (each["containerPort"] for each in container_of(workload)["ports"] if each["name"] == name)
    return port


def test_the_front_service_knows_every_replica_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(FrontSettings, the("Deployment", "llm-functionalities"), monkeypatch)
    service = the("Service", "tgi-replicas")
    port = port_of(the("StatefulSet", "tgi"), "http")
    replicas = the("HorizontalPodAutoscaler", "tgi")["spec"]["maxReplicas"]
    assert the("StatefulSet", "tgi")["spec"]["serviceName"] == service["metadata"]["name"]
    assert settings.inference_endpoint_url == [f"http://tgi-{each}.tgi-replicas:{port}" for each in range(replicas)]


@pytest.mark.parametrize("manifest", manifests(), ids=name_of)
def test_what_selects_pods_finds_some(manifest: Manifest) -> None:
    spec = manifest["spec"]
    selector = spec.get("selector") or spec.get("podSelector") or {}
    labels = selector.get("matchLabels", selector)
    if manifest["kind"] == "HorizontalPodAutoscaler":
        target = spec["scaleTargetRef"]
        assert the(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
        return
    workload = selected(labels)
    for port in spec.get("ports", ()):
        port_of(workload, port["targetPort"])
    for rule in spec.get("ingress", ()):
        port_of(workload, rule["ports"][0]["port"])


def selected(labels: dict[str, str]) -> Manifest:
    (workload,) = (
        each for each in WORKLOADS if labels.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    )
    return workload


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_a_container_may_do_no_more_than_it_needs(workload: Manifest) -> None:
    pod, container = pod_of(workload), container_of(workload)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"])


def test_both_services_have_one_key_and_do_not_start_without_it() -> None:
    keys = [
        variable["valueFrom"]
        for workload in WORKLOADS
        for variable in container_of(workload)["env"]
        if variable["name"] in ("API_KEY", "ENDPOINT_TOKEN")
    ]
    assert keys == [{"secretKeyRef": {"name": "oatmill", "key": "api-key"}}] * 2


def test_triton_has_a_place_for_its_kernels() -> None:
    container = container_of(the("StatefulSet", "tgi"))
    (home,) = (variable["value"] for variable in container["env"] if variable["name"] == "TRITON_HOME")
    assert home in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_network_lets_each_service_be_reached_by_those_who_call_it() -> None:
    tgi, front = the("NetworkPolicy", "tgi")["spec"], the("NetworkPolicy", "llm-functionalities")["spec"]
    assert tgi["policyTypes"] == front["policyTypes"] == ["Ingress", "Egress"]
    (callers,) = tgi["ingress"]
    assert selected(callers["from"][0]["podSelector"]["matchLabels"])["metadata"]["name"] == "llm-functionalities"
    (calls,) = (rule for rule in front["egress"] if "podSelector" in rule["to"][0])
    port_of(selected(calls["to"][0]["podSelector"]["matchLabels"]), calls["ports"][0]["port"])


def probes(workload: Manifest) -> Iterator[Manifest]:
    return (container_of(workload)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))


def test_probes_ask_what_the_servers_answer() -> None:
    for probe in probes(the("StatefulSet", "tgi")):
        assert probe["httpGet"] == {"path": "/health", "port": "http"}
        assert probe["timeoutSeconds"] > HEALTH_SECONDS
    for probe in probes(the("Deployment", "llm-functionalities")):
        assert probe["grpc"] == {"port": port_of(the("Deployment", "llm-functionalities"), "grpc")}


def test_the_autoscaler_asks_for_a_metric_that_there_is() -> None:
    (metric,) = the("HorizontalPodAutoscaler", "tgi")["spec"]["metrics"]
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    name = metric["pods"]["metric"]["name"]
    assert name == rule["name"]["as"] == rule["seriesQuery"].partition("{")[0]
    assert f"\n{name} 0.0" in Metrics().expose().decode()
    annotations = the("StatefulSet", "tgi")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port_of(the("StatefulSet", "tgi"), "http"))


def test_the_page_builds_the_images_that_the_manifests_name() -> None:
    page = (FOLDER.parent / "README.md").read_text()
    for image in yaml.safe_load((FOLDER / "gpu" / "kustomization.yaml").read_text())["images"]:
        tag = f"{image['newName']}:{image['newTag']}"
        (build,) = (line for line in page.splitlines() if line.startswith("docker build") and f"-t {tag} " in line)
        assert image["name"] != "oatmill-tgi" or "--target tgi " in build
        assert f"docker push {tag}" in page


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_a_container_may_use_the_cores_that_are_set_aside_for_it(workload: Manifest) -> None:
    """It has as many threads as its limit has cores."""
    resources = container_of(workload)["resources"]
    assert resources["limits"]["cpu"] == resources["requests"]["cpu"]
    (patch,) = yaml.safe_load((FOLDER / "cpu" / "kustomization.yaml").read_text())["patches"]
    changed = yaml.safe_load(patch["patch"])[0]["value"]
    assert changed["limits"]["cpu"] == changed["requests"]["cpu"]


def test_service_monitors_find_ports_of_services() -> None:
    monitors = list(yaml.safe_load_all((FOLDER / "service-monitors.yaml").read_text()))
    assert {each["metadata"]["name"] for each in monitors} == {name_of(each).partition("-")[2] for each in WORKLOADS}
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (
            each
            for each in manifests()
            if each["kind"] == "Service" and labels.items() <= each["metadata"]["labels"].items()
        )
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_names_can_be_looked_up_wherever_the_cluster_does_so() -> None:
    for policy in (the("NetworkPolicy", "tgi"), the("NetworkPolicy", "llm-functionalities")):
        rules = [rule for rule in policy["spec"]["egress"] if {"port": 53, "protocol": "UDP"} in rule["ports"]]
        (rule,) = rules
        assert {"namespaceSelector": {}} in rule["to"]
        assert {"ipBlock": {"cidr": "169.254.0.0/16"}} in rule["to"]


CHART = TEMPLATES.parent


@pytest.mark.skipif(not (shutil.which("helm") and shutil.which("kubectl")), reason="there is no helm, or no kubectl")
@pytest.mark.parametrize(("variant", "flags"), [("gpu", []), ("cpu", ["-f", str(CHART / "values-cpu.yaml")])])
def test_the_chart_renders_what_kustomize_does(variant: str, flags: list[str]) -> None:
    def made(*command: str | Path) -> dict[str, Manifest]:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return {name_of(each): each for each in yaml.safe_load_all(result.stdout) if each}

    charted = made("helm", "template", "oatmill", CHART, *flags)
    assert charted == made("kubectl", "kustomize", FOLDER / variant)
    more = made("helm", "template", "oatmill", CHART, *flags, "--set=serviceMonitors=true,tgi.maxReplicas=2,tgi.gpus=2")
    assert len(more) == len(charted) + 2
    variables = {each["name"]: each.get("value") for each in container_of(more["StatefulSet-tgi"])["env"]}
    assert variables["NUM_SHARD"] == "2"
    (endpoints,) = (
        each["value"]
        for each in container_of(more["Deployment-llm-functionalities"])["env"]
        if each["name"] == "INFERENCE_ENDPOINT_URL"
    )
    assert endpoints == "tgi-0.tgi-replicas:8080,tgi-1.tgi-replicas:8080"
    for manifest in more.values():
        if manifest["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_the_chart_is_of_this_version_and_has_a_value_for_all_that_it_asks_for() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for file in TEMPLATES.glob("*.yaml"):
        for path in re.findall(r"\.Values\.([\w.]+)", file.read_text()):
            found = values
            for key in path.split("."):
                found = found[key]


def test_the_chart_is_made_of_the_manifests() -> None:
    assert templates() == {file: file.read_text() for file in TEMPLATES.iterdir()}
    assert "image: {{ .Values.image.registry }}/oatmill-tgi:" in templates()[TEMPLATES / "tgi.yaml"]
    assert not any("# helm:" in text for text in templates().values())
