"""The key hash: fixed for ever, the same one by one and in bulk, and well mixed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onceflow.core.errors import ConfigError, StateError
from onceflow.core.state import hash_key, hash_keys, key_group_of, key_groups
from onceflow.core.state.keys.key_codec import decode_key, encode_key, hash_python_keys

VECTORS = {
    "": 0x9CA066F1A4AB2EEA,
    "a": 0x2E49A6DD9FC6417A,
    "acct-000123": 0xAD79AD3ADF74D4A2,
    "x" * 200: 0x1EE2BF3C26F6F354,
    1: 0x4F91F7E85AD5CE00,
    -1: 0x2D16C656A8713C98,
    ("a", 1): 0x90AB2D0FB53B2FB3,
    datetime(1970, 1, 2): 0xB04CCCA011A0D7C2,
}


@pytest.mark.parametrize("key", VECTORS, ids=repr)
def test_the_hash_is_what_every_checkpoint_was_written_with(key: Any) -> None:
    assert hash_key(key) == VECTORS[key]


INTEGERS = {
    pa.int8(): (-(2**7), 2**7 - 1),
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint8(): (0, 2**8 - 1),
    pa.uint16(): (0, 2**16 - 1),
    pa.uint32(): (0, 2**32 - 1),
    pa.uint64(): (0, 2**64 - 1),
}
INSTANTS = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))
COLUMNS: st.SearchStrategy[tuple[Any, list[Any]]] = st.one_of(
    *(
        st.tuples(st.just(kind), st.lists(st.integers(low, high)))
        for kind, (low, high) in INTEGERS.items()
    ),
    *(
        st.tuples(st.just(kind), st.lists(st.text(max_size=40) | st.text("aä", min_size=100)))
        for kind in (pa.string(), pa.large_string(), pa.string_view())
    ),
    *(
        st.tuples(st.just(kind), st.lists(st.binary(max_size=300)))
        for kind in (pa.binary(), pa.large_binary(), pa.binary_view())
    ),
    st.tuples(st.just(pa.binary(5)), st.lists(st.binary(min_size=5, max_size=5))),
    st.tuples(st.just(pa.bool_()), st.lists(st.booleans())),
    st.tuples(st.sampled_from([pa.date32(), pa.date64()]), st.lists(st.dates())),
    st.tuples(st.just(pa.timestamp("us")), st.lists(INSTANTS)),
    st.tuples(
        st.just(pa.timestamp("us", "Europe/Berlin")),
        st.lists(
            st.datetimes(
                datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(timezone.utc)
            )
        ),
    ),
    st.tuples(
        st.just(pa.decimal128(20, 3)),
        st.lists(st.decimals(-(10**15), 10**15, places=3, allow_nan=False)),
    ),
    st.tuples(st.just(pa.dictionary(pa.int8(), pa.string())), st.lists(st.sampled_from("abc"))),
)


@given(COLUMNS, st.integers(0, 3), st.integers(0, 3))
@example((pa.string(), ["", "a", ""]), 1, 0)
@example((pa.string(), ["x" * 128, "x" * 129, "x" * 127, ""]), 0, 0)
def test_the_bulk_hash_equals_the_hash_of_each_value(
    column: tuple[Any, list[Any]], before: int, behind: int
) -> None:
    kind, values = column
    whole = pa.array(values, kind)
    part = whole.slice(before, max(len(values) - before - behind, 0))
    assert hash_keys([part]).tolist() == [hash_key(value) for value in part.to_pylist()]


@given(
    st.lists(
        st.tuples(st.text(max_size=12), st.integers(-(2**63), 2**63 - 1), st.dates()), max_size=20
    )
)
def test_the_bulk_hash_of_several_columns_equals_that_of_tuples(rows: list[Any]) -> None:
    kinds = (pa.string(), pa.int64(), pa.date32())
    arrays = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(kinds)]
    assert hash_keys(arrays).tolist() == [hash_key(row) for row in rows]
    assert hash_python_keys(rows).tolist() == [hash_key(row) for row in rows]


@given(
    st.one_of(
        st.lists(st.text()),
        st.lists(st.integers(-(2**70), 2**70)),
        st.lists(st.one_of(st.text(), st.integers(), st.binary(), st.booleans())),
        st.lists(st.one_of(st.tuples(st.text()), st.tuples(st.integers(), st.binary()))),
    )
)
def test_the_bulk_hash_of_python_keys_equals_the_hash_of_each(keys: list[Any]) -> None:
    assert hash_python_keys(keys).tolist() == [hash_key(key) for key in keys]


def test_one_instant_has_one_hash_in_every_unit() -> None:
    instant = datetime(2024, 2, 29, 1, 2, 3)
    hashes = {
        hash_keys([pa.array([instant], pa.timestamp(unit))])[0] for unit in ("s", "ms", "us", "ns")
    }
    assert hashes == {hash_key(instant)}
    zone = timezone(timedelta(hours=2))
    assert hash_key(datetime(2024, 1, 1, 2, tzinfo=zone)) == hash_key(
        datetime(2024, 1, 1, tzinfo=timezone.utc)
    )


def test_columns_in_another_order_or_cut_elsewhere_hash_differently() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("", "abc"), ("abc", "")]
    assert len({hash_key(pair) for pair in pairs}) == len(pairs)


def test_a_null_key_is_refused_with_column_and_row() -> None:
    with pytest.raises(StateError, match=r"'account' is null in row 1"):
        hash_keys([pa.array([1, 2]), pa.array(["a", None])], ["id", "account"])
    with pytest.raises(StateError, match="key column '0' is null"):
        hash_keys([pa.array([None], pa.int64())])
    coded = pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None]))
    with pytest.raises(StateError, match="null"):
        hash_keys([coded])


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.float16(), pa.list_(pa.int8()), pa.null(), pa.duration("s")], ids=str
)
def test_a_column_that_cannot_be_a_key_is_refused_by_name_and_type(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"'price' has type {str(kind)[:4]}"):
        hash_keys([pa.array([], kind)], ["price"])
    with pytest.raises(ConfigError, match="at least one column"):
        hash_keys([])


@pytest.mark.parametrize(
    "key", [None, 1.5, [], object(), Decimal("NaN"), ()], ids=lambda key: type(key).__name__
)
def test_a_value_that_cannot_be_a_key_is_refused(key: Any) -> None:
    with pytest.raises(StateError):
        hash_key(key)


@pytest.mark.parametrize("max_parallelism", [1, 2, 100, 128, 32_768])
def test_key_groups_are_the_hash_modulo_max_parallelism(max_parallelism: int) -> None:
    keys = [f"k{number}" for number in range(1000)]
    groups = key_groups(hash_keys([pa.array(keys)]), max_parallelism)
    assert groups.tolist() == [key_group_of(key, max_parallelism) for key in keys]
    assert int(groups.max()) < max_parallelism


@pytest.mark.parametrize("max_parallelism", [0, -1, 32_769])
def test_an_impossible_max_parallelism_is_refused(max_parallelism: int) -> None:
    with pytest.raises(ConfigError, match=str(max_parallelism)):
        key_groups(np.zeros(1, np.uint64), max_parallelism)


def _flip_rates(originals: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """Return how often each bit of the hash changes when each bit of the key does."""
    bits = 8 * len(originals[0])
    before = hash_keys([pa.array(originals, pa.binary())])
    rates = np.zeros((bits, 64))
    for bit in range(bits):
        flipped = [
            key[: bit // 8] + bytes([key[bit // 8] ^ (1 << bit % 8)]) + key[bit // 8 + 1 :]
            for key in originals
        ]
        change = before ^ hash_keys([pa.array(flipped, pa.binary())])
        rates[bit] = [int((change >> np.uint64(out) & np.uint64(1)).sum()) for out in range(64)]
    return rates / len(originals)


@pytest.mark.parametrize("length", [3, 8, 19])
def test_every_bit_of_a_key_changes_every_bit_of_the_hash_half_of_the_time(length: int) -> None:
    rng = np.random.default_rng(length)
    rates = _flip_rates([rng.bytes(length) for _ in range(2000)])
    # Six standard deviations of a fair coin tossed 2,000 times.
    assert float(np.abs(rates - 0.5).max()) < 6 * 0.5 / np.sqrt(2000)


@pytest.mark.parametrize(
    "arrays",
    [
        [pa.array(np.arange(100_000))],
        [pa.array(np.arange(100_000) << 40)],
        [pa.array([f"account-{number:06d}" for number in range(100_000)])],
        [pa.array(np.arange(100_000) % 300), pa.array(np.arange(100_000) // 300)],
    ],
    ids=["counting", "high bits", "text", "two columns"],
)
def test_keys_that_look_alike_spread_evenly_and_do_not_collide(arrays: list[Any]) -> None:
    hashes = hash_keys(arrays)
    assert len(np.unique(hashes)) == 100_000
    for shift in (0, 32, 57):
        counts = np.bincount(((hashes >> np.uint64(shift)) & np.uint64(127)).astype(int))
        assert len(counts) == 128
        assert 600 < counts.min() <= counts.max() < 970


@given(
    st.recursive(
        st.one_of(
            st.text(), st.binary(), st.integers(), st.booleans(), st.dates(), INSTANTS,
            st.decimals(allow_nan=False, allow_infinity=False),
            st.datetimes(timezones=st.just(timezone.utc)),
        ),
        lambda parts: st.lists(parts, min_size=1, max_size=3).map(tuple),
        max_leaves=4,
    )
)  # fmt: skip
def test_encoded_keys_decode_to_equal_keys_of_the_same_type(key: Any) -> None:
    decoded = decode_key(encode_key(key))
    assert decoded == key
    assert type(decoded) is type(key)
    assert hash_key(decoded) == hash_key(key)


def test_encoded_integers_and_dates_sort_as_they_do() -> None:
    numbers = [-(2**63), -5, -1, 0, 1, 255, 256, 2**63 - 1]
    assert sorted(map(encode_key, numbers)) == [encode_key(number) for number in numbers]
    days = [date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(2024, 5, 5)]
    assert sorted(map(encode_key, days)) == [encode_key(day) for day in days]
