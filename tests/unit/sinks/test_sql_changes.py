"""Buffered changes come to what their rows do one by one, sorted, in memory or in files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.drawn_columns import run_drawn

from onceflow.core.arrow.kinds import to_plain_rows
from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.sql.changes import ChangeBuffer, TableChanges
from onceflow.sinks.sql.unchanged import UnchangedSets
from onceflow.sinks.sql.write_mode import ChangeRules, Classified, WriteMode

SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("value", pa.int64())])
KEY = ("id", "part")
CHANGING = [WriteMode.UPSERT, WriteMode.IGNORE, WriteMode.UPDATE]

Row = tuple[int, str, int]
Step = tuple[int, str, int, bool]


def _classified(steps: Sequence[Step]) -> Classified:
    rows = pa.RecordBatch.from_pylist(
        [{"id": i, "part": p, "value": v} for i, p, v, _ in steps], schema=SCHEMA
    )
    return Classified(rows, pa.array([delete for *_, delete in steps], pa.bool_()))


def _apply_one_by_one(
    table: dict[tuple[int, str], int], steps: Sequence[Step], mode: WriteMode
) -> None:
    for number, part, value, delete in steps:
        key = (number, part)
        if delete:
            table.pop(key, None)
        elif mode is WriteMode.UPSERT or (mode is WriteMode.IGNORE) == (key not in table):
            table[key] = value


def _apply(
    table: dict[tuple[int, str], int], changes: TableChanges, mode: WriteMode
) -> list[list[Row]]:
    deletes, puts = _rows(changes.deletes()), _rows(changes.puts())
    for number, part, _ in deletes:
        table.pop((number, part), None)
    _apply_one_by_one(table, [(*row, False) for row in puts], mode)
    return [deletes, puts]


def _rows(batches: Any) -> list[Row]:
    return [
        (row["id"], row["part"], row["value"]) for batch in batches for row in batch.to_pylist()
    ]


_STEPS = st.lists(
    st.tuples(
        st.integers(-3, 3), st.sampled_from(["", "a", "b"]), st.integers(0, 9), st.booleans()
    ),
    max_size=60,
)


EXAMPLES = pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.servers)])


@EXAMPLES
def test_outcome_is_that_of_the_rows_one_by_one(examples: int) -> None:
    drawn = given(
        mode=st.sampled_from(CHANGING),
        before=st.dictionaries(
            st.tuples(st.integers(-3, 3), st.sampled_from(["", "a", "b"])), st.just(-1)
        ),
        batches=st.lists(_STEPS, min_size=1, max_size=8),
        memory_bytes_max=st.sampled_from([1, 700, 1 << 20]),
        rows_a_batch=st.integers(1, 7),
    )
    run_drawn(drawn(_check_outcome), examples)


def _check_outcome(
    mode: WriteMode,
    before: dict[tuple[int, str], int],
    batches: list[list[Step]],
    memory_bytes_max: int,
    rows_a_batch: int,
) -> None:
    buffer = ChangeBuffer(
        ChangeRules(mode, KEY), memory_bytes_max=memory_bytes_max, rows_a_batch=rows_a_batch
    )
    expected, found = dict(before), dict(before)
    for steps in batches:
        buffer.add(_classified(steps), "t")
        _apply_one_by_one(expected, steps, mode)
    for change in buffer.changes():
        parts = _apply(found, change, mode)
        for rows in parts:
            keys = [row[:2] for row in rows]
            assert keys == sorted(set(keys)), "sorted, and each key once"
    assert found == expected
    buffer.clear()
    assert buffer.changes() == []


def test_delete_after_upsert_deletes_and_upsert_after_delete_puts() -> None:
    buffer = ChangeBuffer(ChangeRules(WriteMode.UPSERT, KEY))
    buffer.add(_classified([(1, "a", 1, False), (2, "a", 2, True)]), "t")
    buffer.add(_classified([(1, "a", 0, True), (2, "a", 3, False)]), "t")
    (change,) = buffer.changes()
    assert [row[0] for row in _rows(change.deletes())] == [1, 2]
    assert _rows(change.puts()) == [(2, "a", 3)]


def test_first_row_of_a_key_wins_where_later_ones_are_ignored() -> None:
    buffer = ChangeBuffer(ChangeRules(WriteMode.IGNORE, KEY))
    buffer.add(_classified([(1, "a", 1, False), (1, "a", 2, False)]), "t")
    buffer.add(_classified([(1, "a", 3, False)]), "t")
    (change,) = buffer.changes()
    assert _rows(change.puts()) == [(1, "a", 1)]
    assert _rows(change.deletes()) == []


def test_a_put_that_follows_a_delete_in_a_file_stays_before_the_next_file() -> None:
    """The two rows of a key stay in one block, which is read as a whole."""
    rules = ChangeRules(WriteMode.UPSERT, KEY)
    buffer = ChangeBuffer(rules, memory_bytes_max=1, rows_a_batch=1)
    buffer.add(_classified([(1, "a", 0, True), (1, "a", 5, False)]), "t")
    buffer.add(_classified([(1, "a", 7, False)]), "t")
    (change,) = buffer.changes()
    assert _rows(change.deletes()) == [(1, "a", 0)]
    assert _rows(change.puts()) == [(1, "a", 7)]
    buffer.clear()


def test_changes_of_lists_of_views_are_reduced_like_any_others() -> None:
    views = pa.list_(pa.string_view())
    schema = pa.schema([("id", pa.int64()), ("v", views)])
    rows = pa.record_batch([[2, 1, 1, 3], [["b"], ["a"], ["c"], None]], schema=schema)
    buffer = ChangeBuffer(ChangeRules(WriteMode.UPSERT, ("id",)))
    buffer.add(Classified(rows, pa.array([False, False, False, True])), "t")
    (change,) = buffer.changes()
    (deletes,), (puts,) = change.deletes(), change.puts()
    assert deletes["id"].to_pylist() == [3]
    assert puts.to_pylist() == [{"id": 1, "v": ["c"]}, {"id": 2, "v": ["b"]}]


def test_changes_may_be_asked_for_twice_and_come_table_by_table() -> None:
    buffer = ChangeBuffer(ChangeRules(WriteMode.UPSERT, KEY), memory_bytes_max=1)
    buffer.add(_classified([(1, "a", 1, False)]), "z")
    buffer.add(_classified([(2, "a", 2, True)]), "m")
    changes = buffer.changes()
    assert [change.table for change in changes] == ["m", "z"]
    for _ in range(2):
        assert _rows(changes[0].deletes()) == [(2, "a", 2)]
        assert _rows(changes[1].puts()) == [(1, "a", 1)]
    assert buffer.rows == 2
    buffer.clear()
    assert buffer.rows == 0


def test_hot_keys_are_reduced_in_memory_and_never_written_to_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", _no_file)
    buffer = ChangeBuffer(ChangeRules(WriteMode.UPSERT, KEY), memory_bytes_max=20_000)
    for value in range(500):
        buffer.add(_classified([(key, "a", value, False) for key in range(20)]), "t")
    (change,) = buffer.changes()
    assert _rows(change.puts()) == [(key, "a", 499) for key in range(20)]


def _no_file(**_: object) -> None:
    raise AssertionError("a file was opened")


def test_local_disk_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")

    def open_full(**_: object) -> IO[bytes]:
        return full.open("wb", buffering=0)

    monkeypatch.setattr("tempfile.TemporaryFile", open_full)
    buffer = ChangeBuffer(ChangeRules(WriteMode.UPSERT, KEY), memory_bytes_max=1)
    with pytest.raises(SinkError, match="set TMPDIR"):
        buffer.add(_classified([(1, "a", 1, False)]), "t")


def _taken(
    rules: ChangeRules, batch: pa.RecordBatch, policy: OnBadRow = OnBadRow.FAIL
) -> tuple[list[bool], list[dict[str, Any]], list[str]]:
    """Return which rows delete, the rows taken, and the reasons of those rejected."""
    bad = BadRows(policy, batch.schema)
    found = rules.classify(to_plain_rows(batch), bad)
    rejected = bad.take()
    for one in rejected:
        assert one.rows.schema.equals(batch.schema)
    return (
        found.deletes.to_pylist(),
        found.rows.to_pylist(),
        [reason for one in rejected for reason in one.reasons],
    )


def _with_operations(words: Sequence[str | None], kind: pa.DataType) -> pa.RecordBatch:
    ids = pa.array(range(len(words)), pa.int64())
    return pa.record_batch([ids, pa.array(words, pa.string()).cast(kind)], names=["id", "op"])


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_operation_is_understood_in_any_case(kind: pa.DataType) -> None:
    rules = ChangeRules(WriteMode.UPSERT, ("id",), operation_column="op")
    puts = ["insert", "create", "c", "r", "i", "upsert", "U", "Update"]
    batch = _with_operations([*puts, "d", "DELETE"], kind)
    deletes, _, _ = _taken(rules, batch)
    assert deletes == [False] * 8 + [True] * 2
    assert rules.select_table_columns(batch.schema).names == ["id"]


@pytest.mark.parametrize("word", ["x", "", None])
def test_unknown_operation_is_a_bad_row(word: str | None) -> None:
    rules = ChangeRules(WriteMode.UPSERT, ("id",), operation_column="op")
    batch = _with_operations(["c", word, "d"], pa.dictionary(pa.int8(), pa.string()))
    with pytest.raises(BadRow, match=r"operation column 'op' .*\(row 1 of its batch\)"):
        _taken(rules, batch)
    deletes, rows, reasons = _taken(rules, batch, OnBadRow.DROP)
    assert deletes == [False, True]
    assert [row["id"] for row in rows] == [0, 2]
    assert len(reasons) == 1
    assert repr(word) in reasons[0]


def test_null_in_a_key_is_a_bad_row() -> None:
    rules = ChangeRules(WriteMode.UPSERT, KEY, tombstones=True)
    batch = pa.record_batch([[1, None, 3], ["a", "b", None], [1, 2, None]], schema=SCHEMA)
    with pytest.raises(BadRow, match="primary key column 'id' is null"):
        _taken(rules, batch)
    _, rows, reasons = _taken(rules, batch, OnBadRow.DEAD_LETTER)
    assert [row["id"] for row in rows] == [1]
    assert [reason.split(" is null")[0][-6:] for reason in reasons] == ["n 'id'", "'part'"]


def test_row_of_nulls_besides_its_key_is_a_tombstone() -> None:
    rules = ChangeRules(WriteMode.UPSERT, ("id",), tombstones=True, table_column="t")
    batch = pa.record_batch(
        [pa.array([1, 2]), pa.array(["x", "x"]), pa.array([None, "v"]), pa.array([None, None])],
        names=["id", "t", "a", "b"],
    )
    assert _taken(rules, batch)[0] == [True, False]
    assert _taken(ChangeRules(WriteMode.UPSERT, ("id",)), batch)[0] == [False, False]


def test_tombstone_needs_no_operation() -> None:
    rules = ChangeRules(WriteMode.UPDATE, ("id",), tombstones=True, operation_column="op")
    batch = pa.record_batch(
        [pa.array([1, 2]), pa.array([None, "u"]), pa.array([None, 5])], names=["id", "op", "v"]
    )
    assert _taken(rules, batch)[0] == [True, False]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": WriteMode.UPSERT}, "primary_key"),
        ({"tombstones": True}, "write_mode='upsert'"),
        ({"operation_column": "op"}, "write_mode='upsert'"),
        (
            {"mode": WriteMode.UPSERT, "primary_key": ("op",), "operation_column": "op"},
            "'op' is in primary_key",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        ChangeRules(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"primary_key": ("nope",)}, "only the columns id, f, op"),
        ({"primary_key": ("f",)}, "Arrow type double"),
        ({"primary_key": ("id",), "operation_column": "f"}, "must be text"),
        ({"primary_key": ("id",), "table_column": "t"}, "not among the columns of the rows"),
    ],
)
def test_columns_that_cannot_serve_are_refused(settings: dict[str, Any], expected: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("f", pa.float64()), ("op", pa.string())])
    with pytest.raises(ConfigError, match=expected):
        ChangeRules(WriteMode.UPSERT, **settings).select_table_columns(schema)


@pytest.mark.parametrize(
    "kind",
    [
        pa.int16(), pa.uint64(), pa.decimal128(30, 3), pa.string(), pa.large_string(),
        pa.string_view(), pa.binary(), pa.binary_view(), pa.binary(3), pa.bool_(), pa.date32(),
        pa.timestamp("ns", "UTC"), pa.time64("us"), pa.dictionary(pa.int8(), pa.string()),
        pa.run_end_encoded(pa.int16(), pa.int32()), pa.duration("us"),
    ],
    ids=str,
)  # fmt: skip
def test_keys_may_have_any_type_that_databases_have_keys_of(kind: pa.DataType) -> None:
    if pa.types.is_run_end_encoded(kind):
        keys = pc.run_end_encode(pa.array([1, 0, 1], pa.int32()), pa.int16())
    elif pa.types.is_boolean(kind):
        keys = pa.array([True, False, True])
    elif pa.types.is_fixed_size_binary(kind):
        keys = pa.array([b"001", b"000", b"001"], kind)
    elif pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        keys = pa.array([b"1", b"0", b"1"], kind)
    elif "string" in str(kind):
        keys = pa.array(["1", "0", "1"]).cast(kind)
    elif pa.types.is_decimal(kind):
        keys = pa.array([1, 0, 1], pa.int64()).cast(kind)
    else:
        keys = pa.array([1, 0, 1], kind)
    batch = pa.record_batch([keys, pa.array([10, 20, 30])], names=["k", "v"])
    rules = ChangeRules(WriteMode.UPSERT, ("k",))
    rules.select_table_columns(batch.schema)
    for memory_bytes_max in (1, 1 << 20):
        buffer = ChangeBuffer(rules, memory_bytes_max=memory_bytes_max)
        for row in range(3):
            found = rules.classify(
                to_plain_rows(batch.slice(row, 1)), BadRows(OnBadRow.FAIL, batch.schema)
            )
            buffer.add(found, "t")
        (change,) = buffer.changes()
        assert [v for put in change.puts() for v in put.column("v").to_pylist()] == [20, 30]
        buffer.clear()


def test_a_million_changes_are_reduced_and_sorted_within_a_second() -> None:
    """Measured at 2 to 4 times that; a loop over rows would take several seconds of the CPU."""
    count = 1_000_000
    rng = np.random.default_rng(7)
    rows = pa.record_batch(
        [
            pa.array(rng.integers(0, count, count)),
            pa.array(rng.integers(0, 9, count)),
            pa.array(rng.random(count) < 0.1),
        ],
        names=["id", "value", "gone"],
    )
    rules = ChangeRules(WriteMode.UPSERT, ("id",))
    buffer = ChangeBuffer(rules)
    best_s, put, gone = 9.0, 0, 0
    for _ in range(3):
        began = time.process_time()
        for start in range(0, count, 10_000):
            part = rows.slice(start, 10_000)
            buffer.add(Classified(part, part.column("gone")), "t")
        (change,) = buffer.changes()
        put = sum(put.num_rows for put in change.puts())
        gone = sum(delete.num_rows for delete in change.deletes())
        best_s = min(best_s, time.process_time() - began)
        buffer.clear()
    assert put + gone > 600_000
    assert best_s < 3.0


_WIDE = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.int64())])
_UNSENT = st.sets(st.sampled_from(["a", "b"])).map(frozenset)
_PARTIAL_STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 99), _UNSENT, st.booleans()), max_size=40
)


def _put_values(
    table: dict[int, dict[str, Any]], step: tuple[int, int, frozenset[str], bool]
) -> bool:
    """Apply a step to `table`. Return False if no row can keep the values that it lacks."""
    key, number, unsent, is_delete = step
    if is_delete:
        table.pop(key, None)
        return True
    if unsent and key not in table:
        return False
    values = {"a": str(number), "b": number}
    table.setdefault(key, {}).update({n: v for n, v in values.items() if n not in unsent})
    return True


@EXAMPLES
def test_values_that_were_not_sent_are_those_of_the_row_before(examples: int) -> None:
    drawn = given(
        mode=st.sampled_from([WriteMode.UPSERT, WriteMode.UPDATE]),
        batches=st.lists(_PARTIAL_STEPS, min_size=1, max_size=6),
        memory_bytes_max=st.sampled_from([1, 500, 1 << 20]),
        rows_a_batch=st.integers(1, 5),
    )
    run_drawn(drawn(_check_values_that_were_not_sent), examples)


def _check_values_that_were_not_sent(
    mode: WriteMode,
    batches: list[list[tuple[int, int, frozenset[str], bool]]],
    memory_bytes_max: int,
    rows_a_batch: int,
) -> None:
    sets = UnchangedSets()
    buffer = ChangeBuffer(
        ChangeRules(mode, ("id",), unchanged_column="_unchanged"),
        sets,
        memory_bytes_max=memory_bytes_max,
        rows_a_batch=rows_a_batch,
    )
    expected: dict[int, dict[str, Any]] = {key: {"a": "old", "b": -key} for key in range(3)}
    written = {key: dict(row) for key, row in expected.items()}
    for batch in batches:
        if mode is WriteMode.UPDATE:
            taken = batch
            for step in batch:
                if step[3] or step[0] in expected:
                    _put_values(expected, step)
        else:
            taken = [step for step in batch if _put_values(expected, step)]
        rows = pa.RecordBatch.from_pylist(
            [
                {
                    "id": key,
                    "a": None if "a" in unsent else str(number),
                    "b": None if "b" in unsent else number,
                }
                for key, number, unsent, _ in taken
            ],
            schema=_WIDE,
        )
        deletes = pa.array([step[3] for step in taken], pa.bool_())
        numbers = [0 if step[3] else sets.add(step[2]) for step in taken]
        buffer.add(Classified(rows, deletes), "t", np.array(numbers, np.int32))
    for change in buffer.changes():
        for deleted in change.deletes():
            for row in deleted.to_pylist():
                written.pop(row["id"], None)
        for put in change.puts():
            for row in put.to_pylist():
                if mode is WriteMode.UPSERT or row["id"] in written:
                    written[row["id"]] = {"a": row["a"], "b": row["b"]}
        for part in change.updates():
            for row in part.rows.to_pylist():
                assert mode is WriteMode.UPDATE or row["id"] in written
                if row["id"] in written:
                    present = {n: row[n] for n in ("a", "b") if n not in part.unchanged}
                    written[row["id"]].update(present)
    assert written == expected
    buffer.clear()


def test_values_from_before_a_delete_fill_no_later_row() -> None:
    sets = UnchangedSets()
    rules = ChangeRules(WriteMode.UPSERT, ("id",), unchanged_column="_unchanged")
    buffer = ChangeBuffer(rules, sets)
    rows = pa.RecordBatch.from_pylist([{"id": 1, "a": "x", "b": 1}, {"id": 1}, {"id": 1, "b": 2}])
    deletes = pa.array([False, True, False])
    numbers = np.array([0, 0, sets.add(frozenset({"a"}))], np.int32)
    buffer.add(Classified(rows.cast(_WIDE), deletes), "t", numbers)
    (change,) = buffer.changes()
    # The update of a row that is absent is left to the target, which says so.
    assert list(change.puts()) == []
    (part,) = change.updates()
    assert part.unchanged == {"a"}
    buffer.clear()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": WriteMode.IGNORE, "primary_key": ("id",)}, "write_mode='ignore' never updates"),
        ({}, "write_mode='insert' never updates"),
        (
            {"mode": WriteMode.UPSERT, "primary_key": ("id",), "tombstones": True},
            "would be a delete",
        ),
        ({"mode": WriteMode.UPSERT, "primary_key": ("u",)}, "'u' is in primary_key"),
    ],
)
def test_settings_that_cannot_keep_values_are_refused(
    settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        ChangeRules(unchanged_column="u", **settings)


def test_rows_that_may_lack_values_are_refused_unless_the_sink_keeps_them() -> None:
    lists = pa.list_(pa.string())
    schema = pa.schema([("id", pa.int64()), ("v", pa.string()), ("_unchanged", lists)])
    by_key: dict[str, Any] = {"mode": WriteMode.UPSERT, "primary_key": ("id",)}
    with pytest.raises(ConfigError, match="REPLICA IDENTITY FULL"):
        ChangeRules(**by_key).select_table_columns(schema)
    rules = ChangeRules(**by_key, unchanged_column="_unchanged")
    assert rules.select_table_columns(schema).names == ["id", "v"]
    with pytest.raises(ConfigError, match="lists of texts"):
        ChangeRules(**by_key, unchanged_column="v").select_table_columns(schema)
    # An append writes the column: readers of the table can tell such values from nulls.
    assert ChangeRules().select_table_columns(schema) == schema


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string())])
def test_each_list_of_names_gets_the_number_of_its_set(kind: pa.DataType) -> None:
    rows = [["skipped"], ["b", "a"], None, ["a", "b"], [], ["a"], ["ab"], [None, "a"], ["a", "b"]]
    sets = UnchangedSets()
    numbers = sets.encode(pa.array(rows, kind).slice(1))
    assert [sets.names(number) for number in numbers.tolist()] == [
        frozenset(names or ()) for names in rows[1:]
    ]
    assert len(set(numbers.tolist())) == 5
