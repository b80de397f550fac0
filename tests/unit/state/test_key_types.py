"""Keys of every type: what is stored is what was given, on every way and with every backend."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import HeapBackend, MapStateDescriptor, RocksDBBackend, ValueStateDescriptor
from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, StateBackend, StateContext
from onceflow.core.state.keys import key_codec, key_columns
from onceflow.core.state.keys.key_columns import python_row_keys
from onceflow.core.state.keys.key_groups import hash_key, hash_keys
from onceflow.core.state.keys.key_index import KeyIndex, decode_keys, encode_keys, to_key_array

NEW_YORK = "America/New_York"
REPEATED_HOUR_S = int(datetime(2024, 11, 3, 5, 30, tzinfo=timezone.utc).timestamp())
"""1:30 in New York, the first of two."""
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH = datetime(1970, 1, 1)


def _counts(kind: pa.DataType, bits: int, edges: Sequence[int], *, signed: bool = True) -> Any:
    """Return columns of values that are a count: of any bits, and the edges often."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    values = st.one_of(st.sampled_from([low, -1 if signed else 1, 0, 1, high, *edges]),
                       st.integers(low, high))  # fmt: skip
    whole = {(32, True): pa.int32(), (64, True): pa.int64()}.get((bits, signed), kind)
    return st.lists(values, max_size=8).map(lambda numbers: pa.array(numbers, whole).view(kind))


def _instants(unit: str, zone: str | None) -> Any:
    a_second = UNITS[unit]
    edges = [REPEATED_HOUR_S * a_second, (REPEATED_HOUR_S + 3600) * a_second]
    if unit != "ns":
        for instant in (datetime.min, datetime.max.replace(microsecond=0), datetime(1677, 1, 1)):
            seconds = (instant - _EPOCH) // timedelta(seconds=1)
            edges += [seconds * a_second, (seconds + 1) * a_second]
    return _counts(pa.timestamp(unit, zone), 64, edges)


def _decimals(precision: int, scale: int) -> Any:
    kind = pa.decimal128(precision, scale)
    most = 10**precision - 1
    numbers = st.one_of(st.sampled_from([-most, -10, -1, 0, 1, 10, most]), st.integers(-most, most))

    def to_array(unscaled: list[int]) -> Any:
        data = b"".join(number.to_bytes(16, "little", signed=True) for number in unscaled)
        return pa.Array.from_buffers(kind, len(unscaled), [None, pa.py_buffer(data)])

    return st.lists(numbers, max_size=8).map(to_array)


def _dates_64(days: list[int]) -> Any:
    return pa.array([day * 86_400_000 for day in days], pa.int64()).view(pa.date64())


TEXTS = st.one_of(st.sampled_from(["", "\0", "a", "a\0", "ä", "x" * 129]), st.text(max_size=20))
BYTES = st.one_of(st.sampled_from([b"", b"\0", b"\0\0", b"\xff" * 129]), st.binary(max_size=20))
COLUMNS: dict[str, Any] = {
    "bool": st.lists(st.booleans(), max_size=8).map(partial(pa.array, type=pa.bool_())),
    **{f"int{bits}": _counts(pa.type_for_alias(f"int{bits}"), bits, ()) for bits in (32, 64)},
    **{
        str(kind): st.lists(st.integers(low, high), max_size=8).map(partial(pa.array, type=kind))
        for kind, low, high in (
            (pa.int8(), -128, 127), (pa.int16(), -(2**15), 2**15 - 1), (pa.uint8(), 0, 255),
            (pa.uint16(), 0, 2**16 - 1), (pa.uint32(), 0, 2**32 - 1),
        )
    },
    "uint64": _counts(pa.uint64(), 64, (2**63,), signed=False),
    **{
        str(kind): st.lists(TEXTS, max_size=8).map(partial(pa.array, type=kind))
        for kind in (pa.string(), pa.large_string(), pa.string_view())
    },
    **{
        str(kind): st.lists(BYTES, max_size=8).map(partial(pa.array, type=kind))
        for kind in (pa.binary(), pa.large_binary(), pa.binary_view())
    },
    "fixed binary": st.lists(st.binary(min_size=3, max_size=3)).map(
        partial(pa.array, type=pa.binary(3))
    ),
    "date32": _counts(pa.date32(), 32, (-719_162, 2_932_896, 2_932_897)),
    "date64": st.lists(
        st.one_of(st.sampled_from([0, -719_162, 2_932_896, 106_751_991_167]),
                  st.integers(-106_751_991_167, 106_751_991_167)), max_size=8
    ).map(_dates_64),
    **{f"{unit} {zone}": _instants(unit, zone) for unit in UNITS for zone in (None, NEW_YORK)},
    **{
        f"decimal({precision}, {scale})": _decimals(precision, scale)
        for precision, scale in ((38, 0), (38, 38), (10, 2), (5, -2))
    },
}  # fmt: skip


def as_dictionary(array: pa.Array) -> pa.Array:
    return array.dictionary_encode() if len(array) else array


for name in ("string", f"us {NEW_YORK}", "decimal(10, 2)"):
    COLUMNS[f"dictionary of {name}"] = COLUMNS[name].map(as_dictionary)
ANY_COLUMN = st.one_of(*COLUMNS.values())


def of_column(array: Any) -> list[Any]:
    """Return what tells the values of a key column apart, without its type's help."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type):
        return [value.as_tuple() for value in array.to_pylist()]
    if pa.types.is_date32(array.type):
        array = array.view(pa.int32())
    if pa.types.is_timestamp(array.type) or pa.types.is_date64(array.type):
        array = array.view(pa.int64())
    return list(array.to_pylist())


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(COLUMNS)))
def test_key_columns_come_back_as_they_were_and_equal_keys_alone_are_equal(
    data: Any, name: str
) -> None:
    array = data.draw(COLUMNS[name])
    columns = key_columns.read_key_columns([array])
    encoded = encode_keys(columns)
    (read,) = decode_keys(encoded, key_columns.read_key_columns([array[:0]]))
    again = to_key_array(read, array.type)
    assert again.type == array.type
    assert of_column(again) == of_column(array)
    hashes = hash_keys([array])
    index = KeyIndex(columns)
    entries, _ = index.resolve(columns, hashes)
    values = list(map(repr, of_column(array)))
    for ways in (encoded.to_pylist(), entries.tolist()):
        assert len(set(ways)) == len(set(values)) == len(set(zip(values, ways, strict=True)))
    assert len(set(zip(values, hashes.tolist(), strict=True))) == len(set(values))
    kept = index.view_keys()[0].take(entries)
    assert of_column(to_key_array(kept, array.type)) == of_column(array), "as a table has them"
    assert hash_keys([again]).tolist() == hashes.tolist()


@settings(deadline=None)
@given(st.data(), st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3))
def test_keys_as_python_values_come_back_as_they_were_with_one_hash(
    data: Any, names: list[str]
) -> None:
    arrays = [data.draw(COLUMNS[name]) for name in names]
    rows = min(map(len, arrays))
    arrays = [array[:rows] for array in arrays]
    try:
        keys = python_row_keys(arrays, names)
    except (BadStateValue, ValueError, OverflowError):
        assume(False)
    encoded = [key_codec.encode_key(key) for key in keys]
    assert key_codec.encode_python_keys(keys).to_pylist() == encoded
    again = [key_codec.decode_key(one) for one in encoded]
    assert list(map(repr, again)) == list(map(repr, keys))
    hashes = hash_keys(arrays).tolist()
    assert hashes == key_codec.hash_python_keys(keys).tolist() == [hash_key(key) for key in again]
    values = [str(row) for row in zip(*map(of_column, arrays), strict=True)]
    assert len(set(keys)) == len(set(encoded)) == len(set(values)), "as a dict has them"


@pytest.mark.parametrize(
    ("kind", "count"),
    [(pa.timestamp("ns"), 1), (pa.timestamp("s"), 253_402_300_800), (pa.timestamp("us"), -(2**63))],
    ids=str,
)
def test_an_instant_that_has_no_datetime_is_no_python_key_and_its_row_is_named(
    kind: Any, count: int
) -> None:
    column = pa.array([0, count], pa.int64()).view(kind)
    with pytest.raises(BadStateValue, match=f"key column 'at' holds {count} ") as caught:
        python_row_keys([column], ["at"])
    assert caught.value.row == 1


NO_KEYS = [
    pa.null(), pa.float16(), pa.float32(), pa.float64(), pa.time32("s"), pa.time64("ns"),
    pa.duration("ns"), pa.month_day_nano_interval(), pa.decimal256(40, 2), pa.list_(pa.int8()),
    pa.struct([("a", pa.int8())]), pa.map_(pa.string(), pa.int8()), pa.list_view(pa.int8()),
    pa.dictionary(pa.int8(), pa.float64()), pa.dictionary(pa.int8(), pa.string_view()),
    pa.run_end_encoded(pa.int32(), pa.string()),
]  # fmt: skip


@pytest.mark.parametrize("kind", NO_KEYS, ids=str)
def test_a_type_that_cannot_be_a_key_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"key column 'price' has type .*cannot be a key"):
        key_columns.check_key_type(kind, "price")


def test_a_column_of_which_arrow_chooses_no_rows_is_refused_by_name() -> None:
    rows = pa.schema([("account", pa.string()), ("note", pa.string_view())])
    with pytest.raises(ConfigError, match="'note' has type string_view"):
        key_columns.check_rows_can_be_divided(rows)
    key_columns.check_rows_can_be_divided(rows.remove(1))


@pytest.mark.parametrize("kind", [float, time, timedelta, UUID, list[int], tuple[int, float]])
def test_a_map_with_keys_that_cannot_be_stored_is_refused_where_it_is_described(kind: Any) -> None:
    with pytest.raises(ConfigError, match="map state 'seen' has keys of type"):
        MapStateDescriptor[Any, int]("seen", kind, int)


# --- maps ----------------------------------------------------------------------------------------

INTEGERS = st.sampled_from([0, 1, -1, 2**63, -(2**63) - 1])
DECIMALS = st.one_of(
    st.sampled_from(list(map(Decimal, ("0", "-0", "1", "1.0", "1.00", "1E+2", "100", "1E-40")))),
    st.decimals(allow_nan=False, allow_infinity=False),
)
DATETIMES = st.sampled_from(
    [
        datetime.min,
        datetime.max,
        datetime(2024, 11, 3, 1, 30),
        datetime(2024, 11, 3, 1, 30, tzinfo=ZoneInfo(NEW_YORK), fold=0),
        datetime(2024, 11, 3, 1, 30, tzinfo=ZoneInfo(NEW_YORK), fold=1),
        datetime(2024, 11, 3, 5, 30, tzinfo=timezone.utc),
        datetime(2024, 11, 3, 6, 30, tzinfo=timezone.utc),
    ]
)
SMALL = st.integers(-2, 2)
PLAIN = st.one_of(SMALL, st.booleans(), st.sampled_from(["", "1", "t"]))
KEYS_OF: dict[str, tuple[Any, Any]] = {
    "any": (Any, PLAIN),
    "int": (int, INTEGERS),
    "bytes": (bytes, BYTES),
    "bool": (bool, st.booleans()),
    "date": (date, st.dates()),
    "Decimal": (Decimal, DECIMALS),
    "datetime": (datetime, DATETIMES),
    "tuple": (tuple[datetime, Decimal], st.tuples(DATETIMES, DECIMALS)),
    "tuple of any": (tuple[Any, Any], st.tuples(PLAIN, PLAIN)),
}
SCALARS = st.one_of(INTEGERS, DECIMALS, DATETIMES, PLAIN, BYTES, st.dates())
MAP_KEYS = st.one_of(SCALARS, st.lists(SCALARS, min_size=1, max_size=2).map(tuple))


def _without_scale(key: Any) -> Any:
    """Return what tells map keys apart: class and value, an instant's in UTC."""
    if issubclass(type(key), tuple):
        return tuple(map(_without_scale, key))
    if isinstance(key, datetime) and key.tzinfo is not None:
        return "utc", key.astimezone(timezone.utc)
    return type(key).__name__, key


@settings(max_examples=50, deadline=None)
@given(st.lists(MAP_KEYS, max_size=6))
def test_map_keys_are_equal_in_memory_exactly_if_their_bytes_are(keys: list[Any]) -> None:
    stored = [key_codec.to_stored_map_key(key) for key in keys]
    for one, its_stored in zip(keys, stored, strict=True):
        again = key_codec.from_stored_map_key(its_stored)
        assert _without_scale(again) == _without_scale(one)
        assert key_codec.to_stored_map_key(again) == its_stored
        for other, others_stored in zip(keys, stored, strict=True):
            equal = _without_scale(one) == _without_scale(other)
            assert equal == (key_codec.encode_map_key(one) == key_codec.encode_map_key(other))
            assert equal == (its_stored == others_stored)


# --- backends ------------------------------------------------------------------------------------

BACKENDS: dict[str, StateBackend] = {
    "heap": HeapBackend(),
    "rocksdb": RocksDBBackend(cache_entries=16),
}
COUNT = ValueStateDescriptor[int]("count", int, default=0)
GROUPS = 128


class Restored:
    """A store that is snapshot and restored between two steps."""

    def __init__(self, backend: StateBackend, directory: Path) -> None:
        self._backend = backend
        self._directory = directory
        self._storage = MemoryStorage()
        self._opened = 0
        self.store = self._open([])

    def _open(self, handles: Sequence[Any]) -> KeyedStateStore:
        self._opened += 1
        scratch = self._directory / f"{self._opened}"
        return self._backend.open(
            StateContext("op", 0, range(GROUPS), GROUPS, scratch), handles, self._storage
        )

    def restart(self) -> None:
        handles = self.store.snapshot(CheckpointId(self._opened)).upload(self._storage)
        self.store.close()
        self.store = self._open(handles)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(max_examples=10, deadline=None)
@given(kind=st.sampled_from(sorted(KEYS_OF)), data=st.data())
def test_maps_hold_the_same_keys_on_every_backend_through_restores(
    backend: str, kind: str, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key_type, keys_of_type = KEYS_OF[kind]
    described = MapStateDescriptor[Any, int]("seen", key_type, int)
    batches = data.draw(st.lists(st.lists(keys_of_type, max_size=8), min_size=2, max_size=3))
    restored = Restored(BACKENDS[backend], tmp_path_factory.mktemp("maps"))
    model: dict[Any, int] = {}
    try:
        for keys in batches:
            seen = restored.store.map_state(described)
            restored.store.finish_open()
            restored.store.set_current_key("one")
            for key in keys:
                known = _without_scale(key)
                assert seen.get(key) == model.get(known)
                if data.draw(st.integers(0, 4)) == 0:
                    seen.remove(key)
                    model.pop(known, None)
                else:
                    seen.put(key, model.get(known, 0) + 1)
                    model[known] = model.get(known, 0) + 1
                assert seen.contains(key) == (known in model)
            assert {_without_scale(key): value for key, value in seen.items()} == model
            assert len(list(seen.keys())) == len(model)
            restored.restart()
    finally:
        restored.store.close()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(sorted(COLUMNS)), data=st.data())
def test_every_key_finds_its_state_again_on_every_backend(
    backend: str, name: str, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    array = data.draw(COLUMNS[name])
    restored = Restored(BACKENDS[backend], tmp_path_factory.mktemp("keys"))
    try:
        keys = python_row_keys([array], [name])
    except (BadStateValue, ValueError, OverflowError):
        keys = []
    rows = np.full(len(array), 1)
    values = list(map(repr, of_column(array)))
    columns = [AccumulatorColumn("n", "count", pa.int64())]
    try:
        for times in (1, 2):
            count = restored.store.value_state(COUNT)
            table = restored.store.accumulators("table", [array.type], columns)
            restored.store.finish_open()
            for key in keys:
                restored.store.set_current_key(key)
                count.set(count.get() + 1)
            for key, value in zip(keys, values, strict=False):
                restored.store.set_current_key(key)
                assert count.get() == times * values.count(value)
            running = table.update([array], None, {"n": rows})["n"].tolist()
            for number, value in enumerate(values):
                before = (times - 1) * values.count(value)
                assert running[number] == before + values[: number + 1].count(value)
            restored.restart()
    finally:
        restored.store.close()
