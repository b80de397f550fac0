"""Tests the findings of `onceflow doctor` about Java, Python, directories, and hanging checks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import onceflow
from onceflow.cli.doctor import storage
from onceflow.cli.doctor.command import Check, examine
from onceflow.cli.doctor.machine import check_java, check_python, install_command
from onceflow.cli.doctor.spark import check_addresses
from onceflow.cli.doctor.storage import check_storage, missing_directories
from onceflow.cli.main import app
from onceflow.clients.kafka.fitness import topic_findings
from onceflow.core.errors import StorageError
from onceflow.core.spi.connector import Area, Finding, Level
from onceflow.core.storage.filesystems.filesystem import CreationUnknown, StorageRefused

JAVA = shutil.which("java")


def levels(findings: Any) -> list[Level]:
    return [finding.level for finding in findings]


def looked_at(storage: str) -> Any:
    return check_storage(storage, missing_directories(storage))


def java_in(directory: Path, version: str) -> Path:
    """A program that calls itself Java of that version."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-14' >&2\n")
    program.chmod(0o755)
    return directory


def test_java_that_spark_runs_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    (finding,) = check_java(30)
    assert finding.level is Level.OK
    assert f"({JAVA})" in finding.found


def test_no_java_on_path_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = check_java(30)
    assert finding.level is Level.PROBLEM
    assert "java is not on PATH" in finding.found
    assert "JAVA_HOME=" in finding.remedy or "apt-get install openjdk" in finding.remedy


def test_java_home_wins_over_path_as_it_does_in_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, told in (("11.0.2", "is Java 11"), ("1.8.0_352", "is Java 8")):
        old = java_in(tmp_path / version, version)
        monkeypatch.setenv("JAVA_HOME", str(old))
        (finding,) = check_java(30)
        assert (finding.level, told in finding.found) == (Level.PROBLEM, True)
        assert finding.needed == "Java 17 or newer"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    (finding,) = check_java(30)
    assert (finding.level, finding.remedy) == (Level.PROBLEM, "unset JAVA_HOME")
    monkeypatch.setenv("JAVA_HOME", str(java_in(tmp_path / "newer", "21.0.1")))
    found = check_java(30)
    assert levels(found) == [Level.OK, Level.WARNING]
    assert "export PATH=" in found[1].remedy


def test_a_java_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = java_in(tmp_path / "stuck", "17") / "bin" / "java"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "stuck"))
    began = time.monotonic()
    (finding,) = check_java(0.5)
    assert time.monotonic() - began < 60
    assert "does not print its version" in finding.found


def test_python_has_what_a_job_needs() -> None:
    assert levels(check_python()) == [Level.OK]


def _executor(host: str, at: str, network_id: str, *, loopback: bool = False) -> dict[str, object]:
    reached = {"at": at, "loopback": loopback, "network_id": network_id}
    return {"host": host, "reached": reached}


def test_executors_that_other_machines_do_not_reach_are_problems_with_the_way_out() -> None:
    executors = [
        _executor("good", "10.0.0.7", "stack 1"),
        _executor("good", "10.0.0.7", "stack 1"),
        _executor("debian", "127.0.1.1", "stack 2", loopback=True),
        _executor("left", "172.17.0.2", "stack 3"),
        _executor("right", "172.17.0.2", "stack 4"),
        {"host": "lost", "reached": {"trouble": "no address"}},
        {"host": "bare", "reached": None},
    ]
    findings = check_addresses({"one_machine": False, "executors": executors})
    assert [finding.found for finding in findings if finding.level is Level.PROBLEM] == [
        "slots on debian would listen at 127.0.1.1, which other machines cannot reach",
        "slots on left and on right would both listen at 172.17.0.2",
        "lost: no address",
    ]
    assert all("slot_host" in finding.remedy for finding in findings if finding.remedy)
    assert findings[0].found == "slots on good would listen at 10.0.0.7"
    assert check_addresses({"one_machine": True, "executors": executors}) == []


@pytest.mark.parametrize(
    ("recorded", "wanted"),
    [
        (None, "ours==1.0"),
        ({"url": "file:///src/ours", "dir_info": {}}, "'ours @ file:///src/ours'"),
        (
            {"url": "https://host/ours.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "'ours @ git+https://host/ours.git@c0ffee'",
        ),
    ],
    ids=["index", "clone", "repository"],
)
def test_executors_are_told_to_install_from_where_the_driver_did(
    recorded: dict[str, Any] | None,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = tmp_path / "ours-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: ours\nVersion: 1.0\n")
    if recorded is not None:
        (installed / "direct_url.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    versions = {"python": "3.11", "ours": "1.0", "on-no-disk": "2.0"}
    command = install_command("/env/bin/python", versions)
    assert command == f"/env/bin/python -m pip install {wanted} on-no-disk==2.0"


def test_a_good_directory_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    found = looked_at(str(tmp_path / "not" / "yet" / "there"))
    assert Level.PROBLEM not in levels(found)
    assert "is writable" in found[0].found
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_memory_is_said_to_end_with_its_machine() -> None:
    memory = Path("/dev/shm")
    if not memory.is_mount():
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir=memory) as root:
        found = {one.found: one for one in check_storage(root, ())}
    assert found["/dev/shm is in memory (tmpfs)"].level is Level.WARNING


def test_topics_that_one_machine_takes_with_it_are_told_apart() -> None:
    area, safe = Area("topic t"), {"min.insync.replicas": "2"}
    for settings, replicas, brokers, expected in (
        (safe, 3, 3, "survive a crash of the broker's process and the loss of its machine"),
        ({"flush.messages": "1"}, 1, 1, "and the loss of its machine"),
        ({}, 1, 1, "but not the loss of its machine"),
        (safe, 1, 3, "1 replica"),
        ({"min.insync.replicas": "1"}, 3, 3, "min.insync.replicas = 1"),
        (safe | {"unclean.leader.election.enable": "true"}, 3, 3, "unclean.leader"),
    ):
        (finding,) = topic_findings(area, settings, replicas, brokers)
        assert expected in finding.found
        assert (finding.level is Level.OK) == ("machine" in expected)


def test_two_checks_at_once_leave_no_directory_that_was_not_there(tmp_path: Path) -> None:
    """The one that is done first finds what the other made; the last one clears it away."""
    root = tmp_path / "not" / "yet" / "there"
    missing = missing_directories(str(root))
    beside = root / "of the other check"
    beside.mkdir(parents=True)
    check_storage(str(root), missing)
    assert list(root.iterdir()) == [beside]
    beside.rmdir()
    check_storage(str(root), missing)
    assert list(tmp_path.iterdir()) == []


def run_without_privilege_to_ignore_permissions(directory: Path) -> tuple[int, Any]:
    """Root writes where it pleases unless that is taken from it."""
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    source = str(Path(onceflow.__file__).parents[1])
    done = subprocess.run(
        [
            *(drop if os.geteuid() == 0 else []),
            *(sys.executable, "-m", "onceflow.cli.main", "doctor", "--no-spark", "--json"),
            *("--storage", str(directory)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": source},
    )
    return done.returncode, json.loads(done.stdout)


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    status, printed = run_without_privilege_to_ignore_permissions(closed / "checkpoints")
    closed.chmod(0o755)
    assert (status, printed["ok"]) == (1, False)
    (finding,) = [one for one in printed["findings"] if one["area"] == "storage"]
    assert finding["level"] == "problem"
    assert f"{closed} is not writable" in finding["found"]
    assert finding["remedy"].startswith("sudo install -d")
    assert list(closed.iterdir()) == []


def test_a_file_system_mounted_read_only_is_told_with_the_mount_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mount needs root: the kernel's answer is what is put in its place."""
    real = os.statvfs("/proc")
    answer = os.statvfs_result((*tuple(real)[:8], real.f_flag | os.ST_RDONLY, real.f_namemax))
    monkeypatch.setattr(os, "statvfs", Mock(return_value=answer))
    (finding,) = looked_at("/proc/checkpoints")
    assert finding.level is Level.PROBLEM
    assert finding.remedy == "sudo mount -o remount,rw /proc"


def test_checks_run_side_by_side_and_none_hides_another() -> None:
    let_go, other = threading.Event(), threading.Event()

    def broken() -> list[Finding]:
        raise RuntimeError("no such luck")

    def hanging() -> list[Finding]:
        let_go.wait(60)
        return []

    def waiting() -> list[Finding]:
        other.wait(30)
        return [Area("third").ok("both ran at once")]

    def meeting() -> list[Finding]:
        other.set()
        return [Area("fourth").ok("fine")]

    checks = [Check("first", broken), Check("second", hanging)]
    checks += [Check("third", waiting), Check("fourth", meeting)]
    began = time.monotonic()
    found = examine(checks, 2.0)
    let_go.set()
    assert time.monotonic() - began < 60
    assert [(one.area, one.level) for one in found] == [
        ("first", Level.PROBLEM),
        ("second", Level.PROBLEM),
        ("third", Level.OK),
        ("fourth", Level.OK),
    ]
    assert "no such luck" in found[0].found
    assert "no answer within 2 s" in found[1].found


def test_what_is_asked_wrongly_ends_with_usage(tmp_path: Path) -> None:
    options = tmp_path / "client.properties"
    options.write_text("sasl.password hunter2\n")
    for arguments, said in (
        (["--topic", "payments"], "need --kafka"),
        (["--url", "oracle://u:hunter2@h/d"], "sink connector 'oracle' is not installed"),
        (["--storage", "s3://u:hunter2@h/d"], "holds a user, a password or a port"),
        (["--storage", "ftp://u:hunter2@h/d"], "not supported"),
        (["--kafka", "h:1", "--kafka-options", str(tmp_path / "nowhere")], "No such file"),
        (["--kafka", "h:1", "--kafka-options", str(options)], "line 1 is not name=value"),
        (["--url", "postgresql://u@h/d", "--password-file", str(tmp_path / "x")], "No such file"),
    ):
        outcome = CliRunner().invoke(app, ["doctor", "--no-spark", *arguments])
        assert (outcome.exit_code, said in outcome.stderr) == (2, True), outcome.stderr
        assert "hunter2" not in outcome.output


def test_findings_are_lines_when_piped_and_name_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    outcome = CliRunner().invoke(app, ["doctor", "--no-spark"])
    assert outcome.exit_code == 1
    lines = outcome.stdout.splitlines()
    assert (
        lines[0] == f"problem  java: JAVA_HOME={tmp_path}/gone has no bin/java,"
        " and Spark uses JAVA_HOME before PATH"
    )
    assert lines[1].split() == ["needed:", "Java", "17", "or", "newer"]
    assert lines[2].split() == ["fix:", "unset", "JAVA_HOME"]
    assert lines[-1] == "1 problem(s), 0 warning(s), 1 ok"


def test_at_a_terminal_a_remedy_is_one_line_that_can_be_copied(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    source = str(Path(onceflow.__file__).parents[1])
    command = [sys.executable, "-m", "onceflow.cli.main", "doctor", "--no-spark"]
    with subprocess.Popen(
        [*command, "--kafka", "127.0.0.1:1"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=os.environ | {"PYTHONPATH": source, "COLUMNS": "60", "TERM": "xterm"},
    ) as process:
        os.close(terminal)
        shown = b""
        # The end of what a terminal shows is an error on Linux and an empty read elsewhere.
        with contextlib.suppress(OSError):
            while chunk := os.read(controller, 65536):
                shown += chunk
        assert process.wait(60) == 1
    os.close(controller)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert "\u2503 what" in plain
    assert (
        "kafka: start it; see its address, listeners, advertised.listeners and the firewall\r\n"
        in plain
    )


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (StorageRefused("cannot create s3://b/x: 403; correct the credentials"), "correct the"),
        (CreationUnknown("cannot create s3://b/x: 503; it may still appear"), "check that the"),
        (StorageError("cannot create s3://b/x: 503"), "check that the store"),
    ],
)
def test_only_the_advice_of_a_refusal_is_shown_as_the_fix(
    monkeypatch: pytest.MonkeyPatch, error: StorageError, remedy: str
) -> None:
    monkeypatch.setattr(storage, "ObjectStorage", Mock())
    monkeypatch.setattr(storage, "_exercise_bucket", Mock(side_effect=error))
    (finding,) = storage.check_bucket("s3://b")
    assert finding.remedy.startswith(remedy)
    assert finding.found.startswith("cannot create s3://b/x: ")
