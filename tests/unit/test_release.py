"""Tests the files of a release, and that they agree with pyproject.toml."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import onceflow

toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
yaml: Any = importlib.import_module("yaml")  # it has no types

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
RECIPE = ROOT / "deploy" / "conda" / "recipe.yaml"

CONDA_NAMES = {
    "confluent-kafka": "python-confluent-kafka",
    "typing-extensions": "typing_extensions",
    "xxhash": "python-xxhash",
}
"""Where conda-forge calls a package by another name."""

EXTRAS = ("cli", "kafka", "mysql", "postgres", "rocksdb")
"""What the recipe always installs: conda knows no extras."""


def project() -> dict[str, Any]:
    described: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found: dict[str, Any] = described["project"]
    return found


def test_only_the_job_that_publishes_may_ask_for_pypis_token_and_it_runs_no_code_of_ours() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert jobs["build"]["permissions"] == {"contents": "read"}
    steps = [step for name in ("attest", "publish") for step in jobs[name]["steps"]]
    assert not any("checkout" in step.get("uses", "") for step in steps)
    assert [step["run"] for step in steps if "run" in step] == ["rm dist/*.cdx.json"]
    assert "secrets." not in WORKFLOW.read_text("utf-8")


def test_only_the_job_that_publishes_the_site_may_write_to_the_repository() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]
    may_write = {name for name, job in jobs.items() if "contents" in job["permissions"]}
    assert {name: jobs[name]["permissions"]["contents"] for name in may_write} == {
        "build": "read",
        "build-site": "read",
        "publish-site": "write",
    }
    commands = "\n".join(step.get("run", "") for step in jobs["publish-site"]["steps"])
    assert [line for line in commands.split("\n") if line and not line.startswith("git ")] == []


def test_a_tag_reaches_the_shell_as_a_variable_only() -> None:
    """A tag's name is anybody's text: in a command it would be code."""
    jobs = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert 'script/release --tag "$TAG"' in commands
    assert [command for command in commands if "${{" in command] == []


def requirements_of(extras: tuple[str, ...]) -> list[str]:
    described = project()["optional-dependencies"]
    return [required for extra in extras for required in described[extra]]


def test_the_recipe_asks_for_what_the_wheel_asks_for() -> None:
    recipe = yaml.safe_load(RECIPE.read_text("utf-8"))
    assert recipe["context"]["version"] == onceflow.__version__
    oldest = re.sub(r"[^\d.]", "", project()["requires-python"])
    assert recipe["context"]["python_min"] == oldest
    asked = {
        CONDA_NAMES.get(required.name, required.name): str(required.specifier)
        for required in map(Requirement, [*project()["dependencies"], *requirements_of(EXTRAS)])
        if required.marker is None
    }
    run = recipe["requirements"]["run"]
    given = dict(line.partition(" ")[::2] for line in run if not line.startswith("python "))
    assert given == asked


def release(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "script" / "release", *arguments], capture_output=True, text=True, check=False
    )


def test_a_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    done = release("--out", str(tmp_path / "dist"), "--tag", "v9.9.9")
    assert done.returncode == 3
    assert f"the tag of it is v{onceflow.__version__}" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_what_is_there_is_not_mixed_with_a_release(tmp_path: Path) -> None:
    done = release("--out", str(tmp_path))
    assert (done.returncode, "delete it" in done.stderr) == (3, True), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_release_is_whole_and_lists_what_an_installation_brings_along(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    done = release("--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    name = f"onceflow-{onceflow.__version__}"
    assert {path.name for path in out.iterdir()} == {
        f"{name}-py3-none-any.whl",
        f"{name}.tar.gz",
        f"{name}.cdx.json",
    }
    listed = json.loads((out / f"{name}.cdx.json").read_text("utf-8"))
    assert listed["bomFormat"] == "CycloneDX"
    assert listed["metadata"]["component"]["name"] == "onceflow"
    components = {canonicalize_name(component["name"]) for component in listed["components"]}
    required = {Requirement(text) for text in project()["dependencies"]}
    asked = {canonicalize_name(each.name) for each in required if each.marker is None}
    assert asked <= components
    assert "py4j" in components, "what packages bring along in their turn"
