"""SQL over a stream, in a job whose slots are killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.runtime.test_batch_iterators import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of

from onceflow import NoRestart, count
from onceflow.core.errors import UserFunctionError

pytest.importorskip("datafusion")


def mark(account: str) -> str:
    return f"<{account}>"


def test_rows_of_a_query_are_written_once_while_slots_are_killed(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(10_000, pause_s=0.002, ends_with=str(tmp_path / "killed"))
    pipeline, records, sink = begin(cluster, tmp_path, source)
    rows = records.sql(
        "SELECT id, amount * 2 AS doubled, mark(account) AS a FROM stream WHERE id % 3 = 0",
        functions={"mark": mark},
    )
    counted = rows.key_by("a", even="id % 2 = 0").running(n=count(), uid="counted")
    counted.project("id", "doubled", "a", "even AS is_even", "n").write(sink, uid="out")
    job = pipeline.start()
    for kill in range(2):
        job.wait_for(checkpoints=2 * (kill + 1))
        os.kill(job.status().slots[kill].pid, signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert job.wait(60).restores >= 1
    assert sorted((row["id"], row["doubled"], row["a"]) for row in sink.rows()) == [
        (one, 2 * amount_of(one), f"<{one % 100}>") for one in range(0, source.records, 3)
    ]
    keys = Counter((row["a"], row["is_even"]) for row in sink.rows())
    assert all(row["is_even"] == (row["id"] % 2 == 0) for row in sink.rows())
    assert {(row["a"], row["is_even"]) for row in sink.rows() if row["n"] == 1} == keys.keys()


def test_a_value_that_an_expression_cannot_take_names_the_operator(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(100)
    pipeline, records, sink = begin(cluster, tmp_path, source, restart=NoRestart())
    numbers = records.sql("SELECT CAST(concat(account, 'x') AS INT) AS n FROM stream", uid="cast")
    numbers.write(sink, uid="out")
    with pytest.raises(UserFunctionError, match=r"operator 'cast' failed: .*Cannot cast"):
        pipeline.run(60)


def test_a_case_of_integers_and_doubles_and_a_difference_of_dates_are_written_as_they_are(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, records, sink = begin(cluster, tmp_path, CountingSource(4))
    rows = records.sql(
        "SELECT id, CASE WHEN id < 2 THEN id ELSE 0.5 END AS share,"
        " CAST('2024-03-0' || (id + 1) AS DATE) - DATE '2024-02-28' AS days FROM stream"
    )
    rows.write(sink, uid="out")
    pipeline.run(60)
    assert sorted((row["id"], row["share"], row["days"]) for row in sink.rows()) == [
        (0, 0.0, 2), (1, 1.0, 3), (2, 0.5, 4), (3, 0.5, 5)
    ]  # fmt: skip


@pytest.mark.parametrize("where", [False, True], ids=["sql", "aggregate"])
def test_a_division_by_zero_names_the_expression_and_the_record(
    cluster: AnyCluster, tmp_path: Path, *, where: bool
) -> None:
    pipeline, records, sink = begin(cluster, tmp_path, CountingSource(100), restart=NoRestart())
    quotients = (
        records.key_by("account").running(n=count(where="10 / (id - 77) > 1"), uid="divided")
        if where
        else records.sql("SELECT 10 / (id - 77) > 1 AS is_large FROM stream", uid="divided")
    )
    quotients.write(sink, uid="out")
    expected = r"operator 'divided' failed: .*10 / \(id - 77\) > 1.*zero.*at record .*'id': 77[,}]"
    with pytest.raises(UserFunctionError, match=expected):
        pipeline.run(60)


@pytest.mark.parametrize("until", [77, 78])
def test_a_query_that_fails_behind_a_filter_is_named_for_the_rows_that_pass(
    cluster: AnyCluster, tmp_path: Path, until: int
) -> None:
    pipeline, records, sink = begin(cluster, tmp_path, CountingSource(100), restart=NoRestart())
    kept = records.sql(f"SELECT * FROM stream WHERE id < {until}", uid="kept")
    quotients = kept.sql("SELECT id, 10 / (id - 77) AS quotient FROM stream", uid="divided")
    quotients.sql("SELECT id FROM stream WHERE id >= 70", uid="last").write(sink, uid="out")
    if until == 77:
        pipeline.run(60)
        assert sorted(row["id"] for row in sink.rows()) == list(range(70, 77))
        return
    with pytest.raises(UserFunctionError, match=r"'divided' failed: .*zero.*record .*'id': 77[,}]"):
        pipeline.run(60)


def test_an_integer_that_leaves_64_bits_ends_the_job_and_is_never_written(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """The control has the same query over the records for which it fits."""
    for name, condition in (("fits", "id < 2"), ("leaves", "id < 3")):
        source = CountingSource(100)
        pipeline, records, sink = begin(cluster, tmp_path / name, source, restart=NoRestart())
        query = f"SELECT id, id * 5000000000000000000 AS n FROM stream WHERE {condition}"
        records.sql(query, uid="large").write(sink, uid="out")
        if name == "fits":
            pipeline.run(60)
            assert sorted(row["n"] for row in sink.rows()) == [0, 5 * 10**18]
            continue
        with pytest.raises(UserFunctionError, match=r"'large' .*leaves int64: 2 \* 5000000000"):
            pipeline.run(60)
        assert sink.rows() == []
