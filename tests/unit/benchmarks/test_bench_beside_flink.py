"""The arithmetic of the comparison with Flink, and what is said where it cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.beside_flink.databases import LedgerRun, LedgerTurns, LedgerWork
from benchmarks.beside_flink.engines import build_flink
from benchmarks.beside_flink.jdbc import to_jdbc_url
from benchmarks.beside_flink.measuring import Checkpoint, Run, Turns
from benchmarks.beside_flink.report import compared, compared_ledgers
from benchmarks.beside_flink.rows import Progress, pairs_near, rows_out
from benchmarks.beside_flink.works import WORKS
from benchmarks.report import Report
from benchmarks.stage import BenchmarkError


def test_rows_of_all_subtasks_are_counted_at_the_same_moment(tmp_path: Path) -> None:
    (tmp_path / "progress-payments-0").write_text("100.0 0\n101.0 1000\n103.0 2000\n104.0 20")
    (tmp_path / "progress-payments-1").write_text("100.5 500\n102.5 900\n")
    progress = Progress(tmp_path)
    assert progress.rows() == [2000, 900]
    assert progress.rows_at(102.0) == 1500 + 800
    assert progress.rows_at(100.25) == 250, "the second has told of none yet"
    assert progress.passed_s(1500) == 101.0
    assert progress.passed_s(4000) is None
    assert progress.is_known_of(2, 102.5)
    assert not progress.is_known_of(2, 102.6)


def test_pairs_near_in_time_are_those_that_counting_finds() -> None:
    left, right = (7, 4), (5, 6)
    times = [
        [row * 2 + split for split, rows in enumerate(side) for row in range(rows)]
        for side in (left, right)
    ]
    near = [(one, other) for one in times[0] for other in times[1] if abs(one - other) <= 3]
    assert pairs_near(left, right, 3) == len(near)


def test_as_many_rows_come_out_as_the_work_says() -> None:
    assert rows_out("balance", [300, 400]) == (700, 700)
    least, most = rows_out("windows", [900_000, 1_000_000])
    assert least < 3 * 98_000 < 4 * 98_000 < most < 5 * 98_000


def test_the_comparison_divides_figures_of_one_turn() -> None:
    balance, paced = WORKS[0], WORKS[-1]
    checkpoints = (Checkpoint(1.0, 200.0, 0.0, 1.2e6), Checkpoint(2.0, 400.0, 3.0, 1.4e6))
    turns = [
        Turns(
            balance,
            "heap",
            (Run(900.0, 1.0, ()), Run(300.0, 2.0, ())),
            (Run(300.0, 4.0, ()), Run(150.0, 8.0, ())),
        ),
        Turns(paced, "rocksdb", (Run(1, 1, checkpoints[:1]),), (Run(1, 1, checkpoints[1:]),)),
    ]
    report = Report(records=1, runs=2, machine={}, beside_flink=turns)
    (table,) = report.tables()
    assert table.row_count == 4
    found = [one.as_json() for one in compared(turns)]
    assert report.as_json()["flink_state"] == found
    assert found[0]["ratio"] == {"median": 2.5, "min": 2.0, "max": 3.0, "runs": 2}
    assert {one.figure: one.ratio and one.ratio.median for one in compared(turns)} == {
        "rows/s": 2.5,
        "CPU us a row": 0.25,
        "checkpoint, ms": 0.5,
        "its synchronous part, ms": 0.5 / 3,
    }


def test_the_ledgers_of_one_turn_are_compared_and_ours_is_shown_by_its_parts() -> None:
    ours_cpu_s = {"engine": 3.0, "slots": 2.0, "jvm": 0.8, "driver": 0.2, "mysql": 6.0}
    ours = LedgerRun.of(2_000_000, 4.0, {**ours_cpu_s, "postgres": 0.0, "kafka": 0.0})
    flinks = LedgerRun.of(2_000_000, 8.0, {"engine": 12.0, "mysql": 8.0, "kafka": 1.0})
    turns = [LedgerTurns(LedgerWork("mysql", "heap"), (ours,), (flinks,))]
    report = Report(records=2_000_000, runs=1, machine={}, ledgers_beside_flink=turns)
    found = {ledger.figure: ledger for ledger in compared_ledgers(turns)}
    assert {
        name: (one.ours.median, one.ratio and one.ratio.median) for name, one in found.items()
    } == {
        "rows/s": (500_000, 2.0),
        "CPU s/M: engine": (1.5, 0.25),
        "CPU s/M: of it slots": (1.0, None),
        "CPU s/M: of it JVM of the driver": (0.4, None),
        "CPU s/M: of it driver": (0.1, None),
        "CPU s/M: database": (3.0, 0.75),
        "CPU s/M: Kafka": (0.005, 0.01),
    }
    (table,) = report.tables()
    assert table.row_count == 7
    assert report.as_json()["flink_databases"] == [one.as_json() for one in found.values()]
    assert found["CPU s/M: of it slots"].as_json()["flink"] is None


@pytest.mark.parametrize(
    ("url", "driver", "expected"),
    [
        ("postgresql://postgres@127.0.0.1:5432/a", "postgresql", "127.0.0.1:5432/a?user=postgres"),
        (
            "mysql://root:a%40b@127.0.0.1:3306/a",
            "mariadb",
            "127.0.0.1:3306/a?user=root&password=a%40b",
        ),
    ],
)
def test_jdbc_names_the_user_among_the_options(url: str, driver: str, expected: str) -> None:
    assert to_jdbc_url(url, driver) == f"jdbc:{driver}://{expected}"


def test_without_java_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchmarkError, match="needs 'java'.*install Maven and a JDK 17"):
        build_flink()
