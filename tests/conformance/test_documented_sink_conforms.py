"""The sink that docs/write-your-own-sink.md writes into directories is one, word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conformance.test_conformance_plugin import ADDOPTS

ROOT = Path(__file__).parents[2]

_TARGET = """
import tempfile
from pathlib import Path
import pyarrow as pa
from arrow_sink import ArrowSink
from onceflow.integration.conformance import SinkTarget

class ArrowTarget(SinkTarget):
    def __init__(self):
        self._directory = tempfile.TemporaryDirectory()
        self._path = Path(self._directory.name)

    def sink(self):
        return ArrowSink(str(self._path))

    def rows(self):
        files = (self._path / "committed").glob("*")
        tables = [pa.ipc.open_file(str(file)).read_all() for file in files]
        return [row for table in tables for row in table.to_pylist()]

    def lose(self, committable):
        (self._path / "prepared" / str(committable.transaction).replace("/", "~")).unlink()

    def close(self):
        self._directory.cleanup()
"""


def test_documented_sink_keeps_every_clause_of_a_sink_without_a_server(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "write-your-own-sink.md").read_text()
    _, _, step = text.partition("## Step by step: a target that can prepare")
    code = re.findall(r"```python\n(.*?)```", step, re.DOTALL)
    (tmp_path / "arrow_sink.py").write_text("\n\n".join(code))
    (tmp_path / "my_targets.py").write_text(_TARGET)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = {ADDOPTS}\n")
    arguments = ["--onceflow-sink=my_targets:ArrowTarget", "--onceflow-rounds=2", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-k", "not job-killed"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = re.findall(r"^\S+ .*(passed|not tested) +[\d.]+", done.stdout, re.MULTILINE)
    assert verdicts.count("passed") == 47, done.stdout
