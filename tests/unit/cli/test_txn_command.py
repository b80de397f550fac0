"""`onceflow txn` with sinks of one's own: what it prints, what it refuses, its exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.aged_log import AgedLog
from tests.support.directory_sink import DirectorySink
from typer.testing import CliRunner

import onceflow
from onceflow.cli.main import app
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import CommitterContext, WriterContext

ROOT = Path(__file__).parents[3]
SINK_ID = "payments.out"
SCHEMA = pa.schema([pa.field("id", pa.int64())])


@pytest.fixture
def log(tmp_path: Path) -> AgedLog:
    log = AgedLog(tmp_path / "checkpoints")
    log.claim()
    return log


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectorySink:
    """The sink that `my_job:make_sink` makes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_job", raising=False)
    (tmp_path / "my_job.py").write_text(
        "from tests.support.directory_sink import DirectorySink\n\n"
        f"def make_sink():\n    return DirectorySink({str(tmp_path / 'out')!r})\n\n"
        "number = 17\n\ndef broken():\n    raise RuntimeError('no such luck')\n"
    )
    sink = DirectorySink(str(tmp_path / "out"))
    sink.open(CommitterContext("payments", "out", SINK_ID, AttemptId(1)), SCHEMA)
    return sink


def pre_commit(sink: DirectorySink, attempt: int, checkpoint: int, *ids: int) -> Committable:
    writer = sink.writer(
        WriterContext("payments", "out", SINK_ID, 0, 1, AttemptId(attempt), CheckpointId(1))
    )
    writer.write(pa.record_batch([pa.array(ids, pa.int64())], schema=SCHEMA))
    (committable,) = writer.pre_commit(CheckpointId(checkpoint))
    return committable


def ids_in(sink: DirectorySink) -> list[int]:
    return sorted(row["id"] for row in sink.rows())


def options(log: AgedLog) -> list[str]:
    return ["--sink", "my_job:make_sink", "--sink-id", SINK_ID, "--storage", str(log.root)]


def run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(app, ["txn", *arguments])
    return outcome.exit_code, outcome.stdout, outcome.stderr


def run_json(*arguments: str) -> tuple[int, Any]:
    status, printed, _ = run(*arguments, "--json")
    return status, json.loads(printed)


def test_list_says_what_is_in_doubt_and_what_happens_next(
    log: AgedLog, sink: DirectorySink
) -> None:
    decided, undecided = pre_commit(sink, 1, 1, 10, 11), pre_commit(sink, 1, 2, 20)
    log.decide(1, [decided])
    status, printed = run_json("list", *options(log))
    assert status == 0
    found = printed["transactions"]
    assert [(one["id"], one["verdict"], one["next_start"], one["rows"]) for one in found] == [
        (str(decided.transaction), "decided", "commit", 2),
        (str(undecided.transaction), "undecided", "abort", None),
    ]
    assert found[0].items() >= {
        "sink": SINK_ID, "attempt": 1, "checkpoint": 1, "subtask": 0, "sequence": 0,
        "kind": "prepared", "in_doubt": True, "age_seconds": None,
    }.items()  # fmt: skip
    status, text, _ = run("list", *options(log))
    assert status == 0
    lines = text.splitlines()
    assert lines[1].split() == [
        str(decided.transaction), "prepared", "2", "?", "decided", "commits", "it",
    ]  # fmt: skip
    assert "undecided" in lines[2]


def test_check_turns_what_is_in_doubt_into_an_exit_status(
    log: AgedLog, sink: DirectorySink
) -> None:
    assert run("list", *options(log), "--check")[0] == 0
    assert "nothing is in doubt" in run("list", *options(log))[1]
    pre_commit(sink, 1, 1, 10)
    assert run("list", *options(log))[0] == 0
    assert run("list", *options(log), "--check")[0] == 1


def test_commit_and_abort_do_what_the_log_says_and_nothing_else(
    log: AgedLog, sink: DirectorySink
) -> None:
    decided, undecided = pre_commit(sink, 1, 1, 10), pre_commit(sink, 1, 2, 20)
    log.decide(1, [decided])
    for command, wrong in (("commit", undecided), ("abort", decided)):
        status, printed = run_json(command, str(wrong.transaction), *options(log), "--yes")
        assert status == 1
        assert [result["outcome"] for result in printed["results"]] == ["refused"]
    assert ids_in(sink) == []
    assert len(sink.prepared()) == 2

    status, printed = run_json("commit", str(decided.transaction), *options(log), "--yes")
    assert (status, [r["outcome"] for r in printed["results"]]) == (0, ["committed"])
    status, printed = run_json("commit", str(decided.transaction), *options(log), "--yes")
    assert (status, [r["outcome"] for r in printed["results"]]) == (0, ["already_committed"])
    status, text, _ = run("abort", str(undecided.transaction), *options(log), "--yes")
    assert status == 0
    assert f"{undecided.transaction} rolled back" in text
    assert ids_in(sink) == [10]
    assert sink.prepared() == []


def test_all_takes_what_the_log_allows_and_leaves_the_rest(
    log: AgedLog, sink: DirectorySink
) -> None:
    decided = [pre_commit(sink, 1, 1, 10), pre_commit(sink, 1, 2, 20)]
    undecided = pre_commit(sink, 1, 3, 30)
    log.decide(2, decided)
    status, printed = run_json("commit", "--all", *options(log), "--yes")
    assert status == 0
    assert [result["id"] for result in printed["results"]] == [str(c.transaction) for c in decided]
    assert ids_in(sink) == [10, 20]
    assert sink.prepared() == [str(undecided.transaction).replace("/", "~")]
    status, text, _ = run("commit", "--all", *options(log), "--yes")
    assert status == 0
    assert "nothing to commit" in text


def test_force_commits_what_is_not_decided_and_says_so(log: AgedLog, sink: DirectorySink) -> None:
    undecided = pre_commit(sink, 1, 1, 10)
    status, text, errors = run(
        "commit", str(undecided.transaction), *options(log), "--yes", "--force"
    )
    assert status == 0
    assert "forced, although committing it would write its rows twice" in errors
    assert "committed: its rows are visible now" in text
    assert ids_in(sink) == [10]


def test_a_job_that_seems_to_run_is_left_alone_until_it_is_fenced(
    log: AgedLog, sink: DirectorySink
) -> None:
    pending = pre_commit(sink, 1, 1, 10)
    log.age(1)
    arguments = ["abort", str(pending.transaction), *options(log), "--yes"]
    status, text, _ = run(*arguments)
    assert status == 1
    assert "seems to be running" in text
    assert "another-host" not in text
    assert sink.prepared() != []
    status, text, errors = run(*arguments, "--fence")
    assert status == 0
    assert "taken over" in errors
    assert sink.prepared() == []


def test_without_a_log_nothing_is_touched(log: AgedLog, sink: DirectorySink) -> None:
    one = pre_commit(sink, 1, 1, 10)
    log.decide(1, [one])
    target = ["--sink", "my_job:make_sink", "--sink-id", SINK_ID]
    status, printed = run_json("show", str(one.transaction), *target)
    assert (status, printed["verdict"]) == (0, "unknown")
    for command in ("commit", "abort"):
        status, text, _ = run(command, str(one.transaction), *target, "--yes")
        assert status == 1
        assert "no decision log was given" in text
    assert len(sink.prepared()) == 1


def test_show_tells_all_of_one_and_fails_for_none(log: AgedLog, sink: DirectorySink) -> None:
    one = pre_commit(sink, 1, 1, 10)
    log.decide(1, [one])
    status, text, _ = run("show", str(one.transaction), *options(log))
    assert status == 0
    assert "decided: completed checkpoint 1 contains it" in text
    assert "commits it" in text
    status, _, errors = run("show", f"{SINK_ID}/9/9/9/0", *options(log))
    assert status == 1
    assert "is not in doubt here" in errors


def test_what_is_asked_wrongly_ends_with_usage(log: AgedLog, sink: DirectorySink) -> None:
    pre_commit(sink, 1, 1, 10)
    storage = ["--storage", str(log.root)]
    for arguments, said in (
        (["list"], "give the target"),
        (["list", "--sink", "my_job:make_sink"], "--sink-id"),
        (["list", "--sink", "my_job", "--sink-id", SINK_ID], "not module:name"),
        (["list", "--sink", "my_job:nothing", "--sink-id", SINK_ID], "AttributeError"),
        (["list", "--sink", "my_job:number", "--sink-id", SINK_ID], "not a Sink"),
        (["list", "--sink", "my_job:broken", "--sink-id", SINK_ID], "no such luck"),
        (["list", "--url", "oracle://x/y"], "sink connector 'oracle' is not installed"),
        (["list", "--job", "payments"], "--job needs --storage"),
        (["list", "--storage", str(log.root / "nowhere")], "no such directory"),
        (["list", *storage, "--job", "refunds"], "jobs there: payments"),
        (["show", "payments", *storage], "is not a transaction id"),
        (["commit", *options(log)], "give transaction ids, or --all"),
        (
            ["commit", "--all", "--force", *options(log)],
            "give the ids of the transactions to force",
        ),
        (["abort", "--all", *options(log)], "the input is not a terminal"),
    ):
        status, _, errors = run(*arguments)
        assert (status, said in errors) == (2, True), (arguments, errors)
    assert len(sink.prepared()) == 1


def test_a_storage_that_holds_several_jobs_needs_the_name(
    log: AgedLog, sink: DirectorySink
) -> None:
    AgedLog(log.root, job="refunds").claim()
    status, _, errors = run("list", *options(log))
    assert (status, "jobs there: payments, refunds" in errors) == (2, True)
    assert run("list", *options(log), "--job", "payments")[0] == 0


def test_a_damaged_log_is_no_answer(log: AgedLog, sink: DirectorySink) -> None:
    pre_commit(sink, 1, 1, 10)
    (record,) = (log.root / "payments" / "log").glob("*.json")
    record.write_bytes(record.read_bytes()[:-20])
    status, _, errors = run("abort", "--all", *options(log), "--yes")
    assert (status, str(record) in errors) == (3, True)
    assert len(sink.prepared()) == 1


@pytest.mark.parametrize("answer", ["n", "y"])
def test_a_person_at_a_terminal_is_asked_first(
    log: AgedLog, sink: DirectorySink, answer: str
) -> None:
    one = pre_commit(sink, 1, 1, 10)
    log.decide(1, [one])
    source = str(Path(onceflow.__file__).parents[1])
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "onceflow.cli.main", "txn", "commit", str(one.transaction)]
    with subprocess.Popen(
        [*command, *options(log)],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((source, str(ROOT)))},
    ) as process:
        os.write(controller, f"{answer}\n".encode())
        text, errors = process.communicate(timeout=60)
    os.close(controller)
    os.close(terminal)
    assert "Commit 1 transaction?" in errors
    assert "decided: completed checkpoint 1 contains it" in errors
    assert process.returncode == (0 if answer == "y" else 1)
    assert ids_in(sink) == ([10] if answer == "y" else [])
    assert ("committed: its rows (1) are visible now" in text) == (answer == "y")
