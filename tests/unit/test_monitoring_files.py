"""Alert rules and dashboards ask for metrics and labels that there are, and Prometheus agrees."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.prometheus import find_program

from onceflow import JobState
from onceflow.core.runtime.metrics.metric_catalog import CATALOG, Metric, MetricType

yaml: Any = importlib.import_module("yaml")  # it has no types

PROMTOOL = find_program("promtool")
ROOT = Path(__file__).parents[2]
FILES = ROOT / "core" / "runtime" / "metrics" / "files"
RULE_TESTS = ROOT / "tests" / "support" / "alert_rules_test.yaml"
COMMON = {"job", "instance", "job_name", "le"}
SELECTOR = re.compile(r"\b(onceflow_\w+)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def series() -> dict[str, Metric]:
    """Return the names that a query may have; a histogram is scraped as three."""
    found: dict[str, Metric] = {}
    for metric in CATALOG:
        is_histogram = metric.type is MetricType.HISTOGRAM
        for suffix in ("_bucket", "_sum", "_count") if is_histogram else ("",):
            found[metric.name + suffix] = metric
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Yield where a query stands, and the query."""
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alerts.yaml {rule['alert']}", rule["expr"]
    for path in sorted(FILES.glob("grafana_*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name} {panel['title']} {target['refId']}", target["expr"]


QUERIES = dict(queries())


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_metrics_and_labels_of_the_catalog(name: str) -> None:
    known, query = series(), QUERIES[name]
    asked = SELECTOR.findall(query)
    assert asked
    labels = set(COMMON)
    for metric, matchers in asked:
        assert metric in known, f"there is no {metric}"
        labels |= set(known[metric].labels)
        for label, value in MATCHER.findall(matchers):
            assert label in {*COMMON, *known[metric].labels}, f"{metric} has no label {label}"
            if label == "state" and metric == "onceflow_job_state":
                assert value in {state.value for state in JobState}
    for grouping in GROUPING.findall(query):
        names = {label.strip() for label in grouping.split(",")} - {""}
        assert names <= labels, f"nothing has {names - labels}"


def test_every_alert_is_tested_to_fire_and_to_resolve() -> None:
    rules = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
    fires: dict[str, list[bool]] = {}
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            fires.setdefault(case["alertname"], []).append(bool(case["exp_alerts"]))
    assert fires.keys() == {rule["alert"] for rule in rules}
    assert {name for name, cases in fires.items() if True not in cases} == set()


@pytest.mark.skipif(not PROMTOOL, reason="no promtool: apt-get install prometheus")
def test_prometheus_takes_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    for path in (FILES / "alerts.yaml", RULE_TESTS):
        shutil.copy(path, tmp_path)
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", RULE_TESTS.name]):
        done = subprocess.run(
            [PROMTOOL, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(FILES.glob("grafana_*.json")), ids=lambda path: path.name)
def test_a_dashboard_names_no_data_source_of_ours_and_overlaps_nowhere(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        area = panel["gridPos"]
        assert area["x"] + area["w"] <= 24
        cells = {
            (x, y)
            for x in range(area["x"], area["x"] + area["w"])
            for y in range(area["y"], area["y"] + area["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_metrics_without_a_query_are_few() -> None:
    """A metric that no alert and no panel shows has to be worth its series all the same."""
    asked = {metric for query in QUERIES.values() for metric, _ in SELECTOR.findall(query)}
    unasked = {metric.name for name, metric in series().items() if name not in asked}
    shown = {metric.name for name, metric in series().items() if name in asked}
    assert len(unasked - shown) <= len(CATALOG) // 3
