"""The manifests in deploy/kubernetes ask Spark for what a job needs, under names that exist."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from onceflow import Metrics, RuntimeSettings
from onceflow.core.runtime.driver.metrics_server import KNOWN_PATHS
from onceflow.core.settings.known_settings import OPTIONS

yaml: Any = importlib.import_module("yaml")  # it has no types

DIRECTORY = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"


def client_mode() -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Spark's settings, the driver's pod, and the variables of its environment."""
    documents = list(yaml.safe_load_all((DIRECTORY / "client-mode.yaml").read_text()))
    (deployment,) = (each for each in documents if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = (word.removeprefix("--conf=") for word in container["args"] if "--conf=" in word)
    settings = dict(setting.split("=", 1) for setting in given)
    return settings, pod, [variable["name"] for variable in container["env"]]


def by_operator() -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Spark's settings, the driver's pod, and the variables of its environment."""
    spec = yaml.safe_load((DIRECTORY / "operator.yaml").read_text())["spec"]
    settings: dict[str, str] = spec["sparkConf"]
    prefix = "spark.kubernetes.driverEnv."
    variables = [name.removeprefix(prefix) for name in settings if name.startswith(prefix)]
    return settings, spec["driverSpec"]["podTemplateSpec"]["spec"], variables


@pytest.mark.parametrize("manifest", [client_mode, by_operator])
def test_a_manifest_keeps_all_slots_and_leaves_time_for_the_last_checkpoint(manifest: Any) -> None:
    settings, pod, variables = manifest()
    assert settings["spark.dynamicAllocation.enabled"] == "false"
    assert settings["spark.speculation"] == "false"
    assert pod["terminationGracePeriodSeconds"] > RuntimeSettings().stop_timeout_s
    known = {"ONCEFLOW_" + option.name.upper().replace(".", "_") for option in OPTIONS}
    ours = {name for name in variables if name.startswith("ONCEFLOW_")}
    assert ours
    assert ours <= known


def test_probes_ask_what_the_driver_answers_at_the_port_that_it_is_told() -> None:
    _, pod, _ = client_mode()
    (container,) = pod["containers"]
    (bind,) = (
        variable["value"]
        for variable in container["env"]
        if variable["name"] == "ONCEFLOW_METRICS_PROMETHEUS_BIND"
    )
    address = Metrics(prometheus_bind=bind).parse_bind()
    assert address is not None
    assert container["ports"] == [{"name": "metrics", "containerPort": address[1]}]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == "metrics"
        assert asked["path"] in KNOWN_PATHS
