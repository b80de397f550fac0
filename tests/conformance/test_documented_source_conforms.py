"""The source of docs/write-your-own-source.md passes the test that the page shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conformance.test_conformance_plugin import ADDOPTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("chosen", "passed"),
    [("not job", 15), pytest.param("killed", 1, marks=pytest.mark.slow)],
)
def test_documented_source_keeps_every_clause_that_its_input_tests(
    chosen: str, passed: int, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "write-your-own-source.md").read_text()
    source, _, source_input = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(source_input.splitlines()) < 60
    (tmp_path / "lines_source.py").write_text(source)
    (tmp_path / "lines_input.py").write_text(source_input)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = {ADDOPTS}\n")
    options = ["--onceflow-source=lines_input:LinesInput", "--onceflow-report=report.json"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", chosen],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance of lines_input:LinesInput" in done.stdout
    verdicts = re.findall(r"^\S+ .*(passed|not tested) +[\d.]+", done.stdout, re.MULTILINE)
    assert verdicts.count("passed") == passed, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sources"]["lines_input:LinesInput"]["conforms"]
    assert report["sinks"] == {}
