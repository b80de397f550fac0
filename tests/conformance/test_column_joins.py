"""Joins whose interval ends at a column, over every backend, compared with a plain model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.state_job import Job
from tests.conformance.test_interval_joins import (
    KEYS,
    ORDERS,
    PAID,
    SCHEMAS,
    Model,
    Row,
    Running,
    counted,
    joining,
    pairs_in,
    sides_of,
    without_pairs,
)
from tests.support.drawn_seeds import draw_random

from onceflow import CoProcessFunction, IntervalJoin
from onceflow.core.errors import ConfigError, UserFunctionError
from onceflow.core.plan.join_functions import JoinKind, TimedJoin
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.operator_descriptions import find_changes


class ColumnModel(Model):
    """The model of a join whose upper limit is the column `order` of the left records."""

    def limit(self, side: int, row: Row) -> int:
        return super().limit(side, row) if side else row[2]


@pytest.mark.parametrize(("lower", "how"), [(400, "inner"), (-3_000, "full")], ids=str)
def test_joins_with_a_column_as_limit_equal_the_model_through_snapshots_and_rescaling(
    job: Job, lower: int, how: JoinKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are before the records' times, near, and an hour away, so moments are coarse."""
    monkeypatch.setattr("onceflow.core.state.states.kept_rows.ROWS_A_CHUNK", 16)
    rng = draw_random()
    join, model = joining(lower, 0, how=how, column="order"), ColumnModel(lower, 0, how)
    running, now = Running(job, join), 10_000
    late, alone, pair_count = list[Row](), Counter[tuple[Any, ...]](), 0
    for step in range(64):
        now += rng.choice([0, 100, 400, 60_000 if step % 24 == 0 else 900])
        side, rows = rng.randrange(2), list[Row]()
        for number in range(rng.choice([1, 1, 4, 25])):
            at = now - 100 * rng.randrange(12)
            distance = rng.choice([-500, 0, 200, 3_000, 70_000, 3_600_000]) + number
            rows.append((f"k{rng.randrange(4)}", at, at + distance))
        expected: list[tuple[Row, Row]] = []
        dealt = running.dealt(rows)
        for row in dealt:
            pairs = model.take(side, row)
            late += [row] if pairs is None else []
            expected += pairs or []
        made = running.take(side, *dealt)
        alone += without_pairs(made)
        assert Counter(pairs_in(made)) == counted(expected)
        assert running.late == late
        pair_count += len(expected)
        if rng.random() < 0.3:
            model.now = max(model.now, now - 100 * rng.randrange(6, 10))
            alone += without_pairs(running.advance(model.now))
            assert alone <= model.alone(model.now)
        if step % 16 == 15:
            before, handles, parallelism = running, running.snapshot(), rng.choice([1, 2, 3])
            running = Running(
                job, join, parallelism=parallelism, handles=handles, event_time=before.event_time
            )
            running.late += before.late
    assert pair_count > 0
    lonely = ("lonely", now, now)
    assert (model.take(0, lonely), pairs_in(running.take(0, lonely))) == ([], [])
    alone += without_pairs(running.advance(MAX_WATERMARK))
    assert alone == model.alone(MAX_WATERMARK)
    assert (len(alone) > 0) == (how != "inner")


def test_a_record_is_dropped_an_eighth_after_its_own_limit_at_most(job: Job) -> None:
    running = Running(job, joining(0, 0, column="order"))
    running.take(
        0, ("a", 10_000, 12_000), ("a", 10_000, 90_000), ("a", 10_000, 253_402_300_799_999)
    )
    running.take(1, ("b", 10_000, 1))
    assert running.kept() == 4
    assert len(running.take(1, ("a", 12_000, 2))) == 3
    running.advance(13_000)
    assert running.kept() == 2
    running.advance(89_999)
    assert len(running.take(1, ("a", 90_000, 3))) == 2
    running.advance(101_000)
    assert running.kept() == 1, "the record of the year 9999"


@pytest.mark.parametrize(
    ("upper", "column", "text"),
    [
        (0, None, "0 ms"),
        (-1, "order", "-1 ms after 'order'"),
        (0, "at", "0 ms after 'at'"),
    ],
)
def test_another_limit_is_refused_while_there_is_state(
    upper: int, column: str | None, text: str
) -> None:
    before = joining(0, 0, column="order").time_settings()
    now = joining(0, upper, column=column).time_settings()
    assert find_changes(before, now) == [f"upper was 0 ms after 'order' and is now {text}"]
    assert find_changes(now, before) == [f"upper was {text} and is now 0 ms after 'order'"]
    assert find_changes(before, joining(0, 0, column="order").time_settings()) == []


@pytest.mark.parametrize(
    ("far", "problem"),
    [(None, r"'order' is null.*is joined with nothing"), (1 << 62, "'order' is .*too far")],
)
def test_a_record_without_a_limit_is_named(job: Job, far: int | None, problem: str) -> None:
    running = Running(job, joining(0, 0, column="order"))
    with pytest.raises(UserFunctionError, match=problem):
        running.take(0, ("a", 10_000, 10_000), ("a", 10_000, far))


def test_columns_of_pairs_are_kept_and_renamed(job: Job) -> None:
    functions: list[CoProcessFunction | TimedJoin] = []

    def take(function: CoProcessFunction | TimedJoin, *, uid: str) -> None:
        functions.append(function)

    pairs = IntervalJoin(take, sides_of(SCHEMAS, how="full"), KEYS).between("-1 s", "order")
    pairs.merge("paid AS sum", "account AS who", "at_left", uid="pairs")
    (function,) = functions
    assert isinstance(function, TimedJoin)
    running = Running(job, function)
    running.take(0, ("a", 10_000, 11_000), ("b", 10_000, 10_500))
    assert running.take(1, ("a", 11_000, 5)) == [{"sum": 5, "who": "a", "at_left": 10_000}]
    running.take(1, ("c", 11_000, 6))
    alone = [(one["who"], one["sum"], one["at_left"]) for one in running.advance(MAX_WATERMARK)]
    assert sorted(alone) == [("b", None, 10_000), ("c", 6, None)]
    for columns, problem in [
        (("at",), "keeps and renames columns.*there are account, at_left"),
        (("paid + 1 AS x",), "Compute others with project"),
        (("paid", "order AS paid"), "two columns get the name 'paid'"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            pairs.merge(*columns, uid="pairs")


def test_bounds_that_are_no_times_are_refused() -> None:
    named = (ORDERS.append(pa.field("note", pa.string())), PAID)
    join = IntervalJoin(lambda function, uid: None, sides_of(named, late=False), KEYS)
    with pytest.raises(ConfigError, match=r"between\(upper='note'\): the column is string"):
        join.between(0, "note")
    with pytest.raises(ConfigError, match=r"between\(lower='at'\): only upper may be a column"):
        join.between("at", "order")
    with pytest.raises(ConfigError, match="upper.*'expires'"):
        join.between(0, "expires")
