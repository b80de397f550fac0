"""The session that starts fast: what its JVM is told, and whose options hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onceflow import session
from onceflow.connectors.spark.class_archive import archive_options
from onceflow.connectors.spark.session import OPTIONS_OF_USERS
from onceflow.core.errors import ConfigError

_OURS = "-XX:TieredStopAtLevel=1"
_SESSION = """
import os, sys
import onceflow
conf = dict(setting.split("=", 1) for setting in sys.argv[1:])
spark = onceflow.session("local[1]", conf={"spark.ui.enabled": "false", **conf})
jvm = spark.sparkContext._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
print(*jvm.getInputArguments())
print(spark.sparkContext.getConf().get("spark.python.daemon.module"))
print(spark.range(3).rdd.map(str).count())
print(os.environ.get("SPARK_SUBMIT_OPTS"))
again = onceflow.session(conf={"spark.sql.shuffle.partitions": "3"})
print(again.sparkContext is spark.sparkContext)
spark.stop()
"""
_SESSIONS = """
import json, os, sys
import onceflow
for environment, conf in json.loads(sys.argv[1]):
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        onceflow.session("local[1]", conf=conf)
    except Exception as error:
        assert "JAVA_GATEWAY_EXITED" in str(error), error
    os.environ.clear()
    os.environ.update(before)
"""
_JAVA_THAT_TELLS = """#!/bin/sh
echo "$SPARK_SUBMIT_OPTS" >> "$TOLD"
exit 3
"""


@pytest.fixture
def jvm_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that has the options of the JVM, once a session was asked for; it never starts."""
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(_JAVA_THAT_TELLS)
    java.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    for name in (*OPTIONS_OF_USERS, "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "told"


def test_the_jvm_compiles_for_a_short_life_unless_its_user_has_options_for_it(
    jvm_options: Path, tmp_path: Path
) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.driver.extraJavaOptions  -XX:+UseParallelGC\n"
    )
    ours: dict[str, str] = {"spark.executor.memory": "1g"}
    of_users: list[tuple[dict[str, str], dict[str, str]]] = [
        ({}, {"spark.driver.extraJavaOptions": "-XX:+UseParallelGC"}),
        *(({name: "-Dmine=1"}, {}) for name in OPTIONS_OF_USERS),
        ({"SPARK_CONF_DIR": str(tmp_path)}, {}),
    ]
    asked = json.dumps([({}, ours), *of_users, ({}, {})])
    run = subprocess.run(
        [sys.executable, "-c", _SESSIONS, asked], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    told = jvm_options.read_text().splitlines()
    expected = [True, *[False] * len(of_users), True]
    assert [_OURS in options for options in told] == expected, told


def test_an_address_of_spark_connect_is_refused_with_what_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"SparkSession\.builder\.remote"):
        session("sc://host:15002")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_first_session_has_the_archive_made_and_the_next_starts_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    assert _OURS not in _run_session("spark.driver.extraJavaOptions=")[0]
    assert not (tmp_path / "cache").exists(), "none is made for who has options of the JVM"
    first, *rest = _run_session()
    assert _OURS in first
    assert "SharedArchiveFile" not in first
    assert rest == ["onceflow.connectors.python_daemon", "3", "None", "True"]
    deadline = time.monotonic() + 240
    while not archive_options():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert archive_options() in _run_session()[0]


def _run_session(*conf: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", _SESSION, *conf],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()
