"""Tests the errors of executors without onceflow, or with another version."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import cloudpickle

from onceflow.connectors.spark.formats import PostgresFormat
from onceflow.connectors.spark.packages import Shipped, ShippedFormat
from onceflow.core.version import VERSION

SOURCE = Path(__file__).parents[3] / "src"


class Carried(Shipped):
    """Something of a driver's."""

    def __init__(self, word: str) -> None:
        self.word = word


# This module is on no path of the other Python's.
Carried.__module__ = "__main__"


def unpickled(pickled: bytes, *path: str) -> subprocess.CompletedProcess[bytes]:
    """Unpickle in a Python that has our libraries and, unless `path` leads to it, no onceflow."""
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).word)"
    return subprocess.run(
        [sys.executable, "-S", "-c", program],
        input=pickled,
        capture_output=True,
        env={"PYTHONPATH": ":".join((*path, sysconfig.get_path("purelib")))},
        timeout=60,
    )


def test_what_is_sent_arrives_as_it_was() -> None:
    done = unpickled(cloudpickle.dumps(Carried("here")), str(SOURCE))
    assert done.stdout.strip() == b"here", done.stderr


def test_an_executor_without_onceflow_says_so_and_what_to_do() -> None:
    done = unpickled(cloudpickle.dumps(Carried("here")))
    assert f"onceflow {VERSION}, which the driver has, is missing on".encode() in done.stderr
    assert b"--py-files" in done.stderr


def test_a_python_without_onceflow_that_is_to_plan_says_which_one_the_driver_runs() -> None:
    done = unpickled(cloudpickle.dumps(ShippedFormat(PostgresFormat)))
    assert f"the driver runs {sys.executable}.".encode() in done.stderr
    assert b"os.environ['PYSPARK_PYTHON'] = sys.executable" in done.stderr


def test_a_format_arrives_as_its_class() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(ShippedFormat(PostgresFormat))) is PostgresFormat


def test_an_executor_with_another_version_says_both(tmp_path: Path) -> None:
    package = tmp_path / "onceflow" / "core"
    package.mkdir(parents=True)
    (package / "version.py").write_text('VERSION = "0.0.9"')
    done = unpickled(cloudpickle.dumps(Carried("here")), str(tmp_path))
    assert b"onceflow is 0.0.9 on" in done.stderr
    assert f"but {VERSION} on the driver".encode() in done.stderr


def test_where_it_was_made_it_is_the_same_object_again() -> None:
    again = cloudpickle.loads(cloudpickle.dumps(Carried("here")))
    assert isinstance(again, Shipped)
    assert vars(again) == {"word": "here"}
