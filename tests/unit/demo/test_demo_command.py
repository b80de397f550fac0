"""The exit status and the printed object say what the target said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from demo import command
from demo.kills import DoneKill
from demo.move import records_before
from demo.report import DemoResult
from demo.run import DemoError, DemoRun
from demo.settings import (
    Backend,
    DemoCommitMode,
    DemoSettings,
    KillKind,
    SinkKind,
    StorageKind,
)
from typer.testing import CliRunner

import onceflow
from onceflow.cli.main import app
from onceflow.core.errors import ConfigError
from onceflow.integration.judge import Verdict

RIGHT = Verdict(
    records=1000,
    rows=1000,
    duplicates=0,
    missing=0,
    unexpected=0,
    wrong_balances=0,
    altered=False,
    in_doubt=0,
)
RESULT = DemoResult(
    settings=DemoSettings(records=1000),
    verdict=RIGHT,
    kills=(
        DoneKill(
            KillKind.SLOT,
            (17,),
            at_records=400,
            committed_records=250,
            at_rows=250,
            at_s=2.5,
            recovered_s=1.25,
        ),
    ),
    restores=1,
    drivers=1,
    seconds=4.0,
)


def _run(
    monkeypatch: pytest.MonkeyPatch, result: DemoResult | Exception, *flags: str
) -> tuple[int, str, str]:
    def execute(_: DemoRun) -> DemoResult:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(DemoRun, "execute", execute)
    outcome = CliRunner().invoke(command.app, flags)
    return outcome.exit_code, outcome.stdout, outcome.stderr


def test_right_table_exits_0_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = _run(monkeypatch, RESULT)
    assert code == 0
    assert "Every payment is there exactly once" in out
    assert "slot" in out


@pytest.mark.parametrize(
    ("at_least_once", "verdict", "said"),
    [
        (True, replace(RIGHT, duplicates=21), ": 21 there twice, as at least once allows."),
        (False, replace(RIGHT, duplicates=21), ": 21 there twice."),
        (True, replace(RIGHT, duplicates=2, missing=3), ": 2 there twice, 3 missing."),
    ],
)
def test_last_line_says_what_is_wrong_and_whether_it_may_be(
    monkeypatch: pytest.MonkeyPatch, at_least_once: bool, verdict: Verdict, said: str
) -> None:
    settings = DemoSettings(records=1000, at_least_once=at_least_once)
    code, out, _ = _run(monkeypatch, replace(RESULT, settings=settings, verdict=verdict))
    assert (code, f"The table is wrong{said}" in " ".join(out.split())) == (1, True)


@pytest.mark.parametrize(
    "verdict",
    [
        replace(RIGHT, rows=1001, duplicates=1),
        replace(RIGHT, rows=999, missing=1),
        replace(RIGHT, wrong_balances=1),
        replace(RIGHT, rows=1001, unexpected=1),
        replace(RIGHT, altered=True),
        replace(RIGHT, in_doubt=1),
    ],
)
def test_every_violation_exits_1_in_both_forms(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    result = replace(RESULT, verdict=verdict)
    code, out, _ = _run(monkeypatch, result)
    assert code == 1
    assert "The table is wrong" in out
    code, out, _ = _run(monkeypatch, result, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_json_is_one_object_with_the_promised_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = _run(monkeypatch, RESULT, "--json", "--quiet")
    assert code == 0
    assert err == ""
    found = json.loads(out)
    assert {
        "records": 1000,
        "rows": 1000,
        "duplicates": 0,
        "missing": 0,
        "wrong_balances": 0,
        "in_doubt": 0,
        "restores": 1,
        "seconds": 4.0,
        "rows_per_second": 250,
        "ok": True,
    }.items() <= found.items()
    assert found["kills"] == [
        {
            "what": "slot",
            "pids": [17],
            "at_records": 400,
            "committed_records": 250,
            "at_rows": 250,
            "at_seconds": 2.5,
            "recovered_seconds": 1.25,
        }
    ]


def test_run_without_a_verdict_exits_2_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = _run(monkeypatch, DemoError("the driver ended with status 3"), "--json")
    assert code == 2
    assert out == ""
    assert "the driver ended with status 3" in err


def test_wrong_flag_exits_2_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = _run(monkeypatch, AssertionError("must not run"), "--records", "0")
    assert code == 2
    assert "--records must be 1 or more" in err


def test_flags_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []

    def remember(settings: DemoSettings, **_: bool) -> DemoResult:
        seen.append(settings)
        return RESULT

    monkeypatch.setattr(command, "_run", remember)
    flags = (
        "--records 5 --accounts 4 --partitions 3 --parallelism 2 --backend rocksdb --kill slot "
        "--kill mariadb --kills 3 --seed 9 --interval 0.5 --sink mariadb --commit-mode ledger"
    )
    assert CliRunner().invoke(command.app, flags.split()).exit_code == 0
    assert seen == [
        DemoSettings(
            sink=SinkKind.MARIADB,
            commit_mode=DemoCommitMode.LEDGER,
            records=5,
            accounts=4,
            partitions=3,
            parallelism=2,
            backend=Backend.ROCKSDB,
            kills=(KillKind.SLOT, KillKind.MARIADB, KillKind.SLOT),
            seed=9,
            interval_s=0.5,
        )
    ]


def test_a_moved_job_has_a_slot_more_and_the_other_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[DemoSettings] = []

    def remember(settings: DemoSettings, **_: bool) -> DemoResult:
        seen.append(settings)
        return RESULT

    monkeypatch.setattr(command, "_run", remember)
    flags = ("--storage", "s3", "--unaligned", "--move", "--records", "1000", "--kills", "0")
    assert CliRunner().invoke(command.app, flags).exit_code == 0
    (asked,) = seen
    assert (asked.storage, asked.unaligned, asked.move) == (StorageKind.S3, True, True)
    assert (asked.parallelism, asked.moved.parallelism) == (2, 3)
    assert asked.moved.backend is Backend.ROCKSDB
    assert asked.moved.moved.backend is Backend.HEAP
    assert asked.moved.spark_master == "local[3]"
    assert (records_before(asked), records_before(replace(asked, move=False))) == (700, 1000)
    with pytest.raises(ConfigError, match="--unaligned needs exactly once"):
        DemoSettings(unaligned=True, at_least_once=True)


def test_at_least_once_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []

    def remember(settings: DemoSettings, **_: bool) -> DemoResult:
        seen.append(settings)
        return RESULT

    monkeypatch.setattr(command, "_run", remember)
    assert CliRunner().invoke(command.app, ["--at-least-once"]).exit_code == 0
    assert seen == [DemoSettings(at_least_once=True)]


@pytest.mark.parametrize(
    ("sink", "place", "judge"),
    [
        (SinkKind.POSTGRES, "table", "What SQL says about the table"),
        (SinkKind.MYSQL, "table", "What SQL says about the table"),
        (SinkKind.KAFKA, "topic", "What a read_committed consumer gets"),
    ],
)
def test_texts_name_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, sink: SinkKind, place: str, judge: str
) -> None:
    settings = replace(RESULT.settings, sink=sink)
    wrong = replace(RESULT, settings=settings, verdict=replace(RIGHT, missing=1))
    code, out, _ = _run(monkeypatch, wrong)
    assert code == 1
    assert judge in out
    assert f"The {place} is wrong" in out


def test_server_program_that_is_missing_exits_2_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONCEFLOW_MYSQLD", str(tmp_path / "nowhere"))
    flags = ("--sink", "mysql", "--records", "10", "--quiet")
    outcome = CliRunner().invoke(command.app, flags)
    assert outcome.exit_code == 2
    assert "ONCEFLOW_MYSQLD" in outcome.stderr
    assert outcome.stdout == ""


def test_version_is_the_package_version() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert outcome.exit_code == 0
    assert outcome.stdout.strip() == onceflow.__version__


def test_the_installed_command_passes_every_flag_to_the_demo_of_its_clone() -> None:
    asked = [sys.executable, "-m", "onceflow.cli.main", "demo"]
    shown = subprocess.run([*asked, "--help"], capture_output=True, text=True, check=True).stdout
    assert "Usage: onceflow demo" in shown
    assert "--at-least-once" in shown
    refused = subprocess.run(
        [*asked, "--kill", "mysql", "--quiet"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "--kill mysql needs --sink mysql" in refused.stderr
