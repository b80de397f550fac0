"""Tests that garbage collection skips modules that a worker of Spark has imported."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
import pyarrow
from onceflow.connectors.spark.reused_worker import spare_imports

seen = len(gc.get_objects())
spare_imports()
left = len(gc.get_objects())
assert left < seen / 100, (seen, left)
frozen = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
spare_imports()
assert gc.get_freeze_count() == frozen, "once a process"
"""


def test_later_collections_pass_over_what_was_imported_and_over_nothing_that_came_since() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
