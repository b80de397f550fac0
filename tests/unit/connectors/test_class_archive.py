"""The archive of Spark's classes: made once, whole or not at all, and never in Spark's way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onceflow.connectors.spark.class_archive import NoArchive, archive_classes, archive_options

_SESSION = """
from pyspark.sql import SparkSession
print(SparkSession.builder.master("local[1]").getOrCreate().range(3).count())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_an_archive_there_is_no_option_and_nothing_is_made(cache: Path) -> None:
    assert archive_options() == ""
    assert not cache.exists()


def test_java_that_fails_is_told_by_what_it_said_and_not_started_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho once >> {started}\necho no memory at all >&2\nexit 3\n")
    java.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    with pytest.raises(NoArchive, match="no memory at all"):
        archive_classes()
    with pytest.raises(NoArchive, match=r"delete the empty .*spark-classes-"):
        archive_classes()
    assert started.read_text() == "once\n"
    left = [path for path in cache.iterdir() if not path.name.endswith(".lock")]
    assert [list(path.iterdir()) for path in left] == [[]]
    assert archive_options() == ""


def test_without_java_the_error_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(cache / "nowhere"))
    assert archive_options() == ""
    with pytest.raises(NoArchive, match="JAVA_HOME"):
        archive_classes()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_session_takes_its_classes_from_the_archive_that_another_process_has_made(
    cache: Path, tmp_path: Path
) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "onceflow.connectors.spark.class_archive"],
        capture_output=True,
        text=True,
        check=True,
    )
    options = made.stdout.strip()
    assert options == archive_options(), made.stderr
    assert str(cache) in options
    loaded = tmp_path / "loaded"
    ran = subprocess.run(
        [sys.executable, "-c", _SESSION],
        env={**os.environ, "SPARK_SUBMIT_OPTS": f"{options} -Xlog:class+load:file={loaded}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split()[-1] == "3"
    sources = [line.rpartition("source: ")[2] for line in loaded.read_text().splitlines()]
    archived = sum(source.startswith("shared objects file") for source in sources)
    # Java's own archive has less than a tenth; what is made while it runs can be in none.
    assert archived > 0.5 * len(sources), (archived, len(sources))
