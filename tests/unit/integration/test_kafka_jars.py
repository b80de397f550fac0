"""Kafka's jars are in the cache whole or not at all, fetched once by whoever comes first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers import ServerError
from onceflow.integration.servers.kafka_jars import java_command, kafka_jars

# Stands for Maven: puts what it is told to fetch where it is told, and notes that it was called.
_MVN = """\
#!/bin/sh
echo called >> "$ONCEFLOW_CACHE/mvn-calls"
for argument; do case $argument in -DoutputDirectory=*) into=${argument#*=};; esac; done
sleep 0.2
touch "$into/kafka_2.13-9.9.9.jar"
[ -e "$ONCEFLOW_CACHE/mvn-breaks" ] && { echo "no route to the repository"; exit 1; }
touch "$into/log4j-slf4j-impl-2.25.4.jar"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, with a Maven that works and an Ivy that does not."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mvn").write_text(_MVN)
    (programs / "mvn").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ONCEFLOW_IVY_SETTINGS", str(tmp_path / "no-such-settings.xml"))
    directory = cache_directory()
    directory.mkdir()
    return directory


def _jars(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_jars_are_fetched_once_and_then_taken_from_the_cache(cache: Path) -> None:
    said: list[str] = []
    first = kafka_jars("9.9.9", progress=said.append)
    assert first == cache / "kafka-9.9.9"
    assert _jars(first) == {"kafka_2.13-9.9.9.jar", "log4j-slf4j-impl-2.25.4.jar"}
    assert len(said) == 1
    assert kafka_jars("9.9.9", progress=said.append) == first
    assert len(said) == 1
    assert (cache / "mvn-calls").read_text().count("called") == 1


def test_failed_fetch_leaves_nothing_and_names_both_clients(cache: Path) -> None:
    (cache / "mvn-breaks").touch()
    with pytest.raises(ServerError, match=r"(?s)mvn: .*no route.*Ivy: .*settings\.xml"):
        kafka_jars("9.9.9")
    assert not (cache / "kafka-9.9.9").exists()
    assert not [path for path in cache.iterdir() if path.is_dir()]
    (cache / "mvn-breaks").unlink()
    assert kafka_jars("9.9.9").is_dir()


def test_processes_that_ask_at_once_fetch_once(cache: Path) -> None:
    program = (
        "from onceflow.integration.servers.kafka_jars import kafka_jars\n"
        "print(len(list(kafka_jars('9.9.9').iterdir())))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0] for process in asking] == ["2\n"] * 3
    assert (cache / "mvn-calls").read_text().count("called") == 1


def test_interrupted_publication_is_never_seen(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(IsADirectoryError), publish(target) as fresh:
        fresh.write_text("a directory cannot be written to")
    assert list(tmp_path.iterdir()) == []


def test_of_two_publications_the_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with publish(target) as slow:
        (slow / "slow").touch()
        with publish(target) as fast:
            (fast / "fast").touch()
    assert _jars(target) == {"fast"}
    assert list(tmp_path.iterdir()) == [target]


def test_missing_java_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ServerError, match=r"install Java 17"):
        java_command()


@pytest.mark.skipif(shutil.which("java") is None, reason="no Java on PATH to compare with")
def test_java_home_without_a_java_falls_back_to_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert java_command() == shutil.which("java")
