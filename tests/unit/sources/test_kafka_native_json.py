"""Records decoded natively become what the other decoder makes of them, or are left to it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sources.test_kafka_fetched import PARTITIONS, fetched
from tests.unit.sources.test_kafka_value_formats import settings_of

from onceflow.core.errors import BadRecord
from onceflow.sources.kafka import decoded_rows
from onceflow.sources.kafka.decoded_rows import ROWS_MIN, open_native_json
from onceflow.sources.kafka.messages import messages_of
from onceflow.sources.kafka.value_formats import JsonRows

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("n", pa.int32()),
        pa.field("account", pa.string(), nullable=False),
        pa.field("note", pa.string()),
    ]
)
PLAIN = b'{"id": 1, "n": -2, "account": "a", "note": null}'
NUMBERS = (
    *("0", "-0", "1", "-1", "01", "-", "+1", "1.0", "1e2", "null", "nul", "true", '"1"', "", " 7 "),
    *("2147483647", "2147483648", "-2147483648", "-2147483649", "999999999999999999"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "1 2"),
)
TEXTS = (
    *('"a"', '""', '"ä€𝄞"', r'"\n"', r'"\u0041"', '"\t"', '"\x7f"', '"', '"a', "null", "1", '"{}"'),
    *('"}"', '"a\nb"', '"\udcff"', '"\udced\udca0\udc80"', '"\udcc0\udc80"', '"a" "b"', "\0"),
)
OTHERS = (
    *('"x": 1', '"x": "y"', '"x": true', '"x": false', '"x": null', '"x": {}', '"x": [1]', '"x"'),
    *('"x": 1.5', r'"\u0069d": 5', '"": 0', '"x": "ä"', '"x": "\udcff"', '"x": fals', "", "x: 1"),
)
SPACES = ("", "", "", " ", "\t", "\r", "\n", "\v", "\0", "/**/")


@pytest.fixture(autouse=True)
def native() -> None:
    pytest.importorskip("onceflow_kafka_native")


def _fields() -> st.SearchStrategy[str]:
    names = {"id": NUMBERS, "n": NUMBERS, "account": TEXTS, "note": TEXTS}
    named = [
        st.tuples(st.just(name), st.sampled_from(SPACES), st.sampled_from(values)).map(
            lambda parts: f'"{parts[0]}"{parts[1]}:{parts[2]}'
        )
        for name, values in names.items()
    ]
    return st.one_of(*named, st.sampled_from(OTHERS))


def _odd_values() -> st.SearchStrategy[bytes]:
    separators = st.sampled_from([",", ", ", " ,", ",,", ""])
    parts = st.tuples(st.lists(_fields(), max_size=6), separators)
    closed = st.sampled_from(["}", "}", "}", "} ", "", "}}", "}{}"])
    return st.tuples(parts, closed).map(
        lambda given: f"{{{given[0][1].join(given[0][0])}{given[1]}".encode(
            "utf-8", "surrogateescape"
        )
    )


def _near_plain_values() -> st.SearchStrategy[bytes]:
    """Return whole records in any order of fields, each value often odd."""

    def join(order: Sequence[str], values: Sequence[str], space: str) -> bytes:
        chosen: dict[str, str] = dict(zip(("id", "n", "account", "note"), values, strict=True))
        fields = [f'"{name}"{space}:{space}{chosen[name]}' for name in order]
        return f"{{{','.join(fields)}{space}}}".encode("utf-8", "surrogateescape")

    orders = st.permutations(["id", "n", "account", "note"]).flatmap(
        lambda order: st.integers(2, 4).map(lambda count: order[:count])
    )
    number = st.just("5") | st.sampled_from(NUMBERS)
    text = st.just('"b"') | st.sampled_from(TEXTS)
    return st.builds(
        join, orders, st.tuples(number, number, text, text), st.sampled_from(SPACES[:6])
    )


def _rows(values: Sequence[bytes], *, natively: bool) -> pa.RecordBatch | str:
    rows = JsonRows(settings_of(SCHEMA))
    read = fetched(values, b"\n")
    try:
        # The client's own objects, one by one, are what the native way is compared with.
        rows.add(read if natively else messages_of(read))
    except BadRecord as error:
        return str(error)
    return rows.take()


def _require_same(values: Sequence[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded_rows, "ROWS_MIN", 1)
        natively = _rows(values, natively=True)
    expected = _rows(values, natively=False)
    if isinstance(natively, str) or isinstance(expected, str):
        assert natively == expected
        return
    natively.validate(full=True)
    assert natively.equals(expected)


def _odd_fields() -> list[str]:
    fields = [f'"id": {one}, "account": "a"' for one in NUMBERS]
    fields += [f'"id": 1, "account": "a", "n": {one}' for one in NUMBERS]
    fields += [f'"id": 1, "account": {one}' for one in TEXTS]
    fields += [f'"id": 1, "account": "a", "note": {one}' for one in TEXTS]
    fields += [f'"id": 1, "account": "a", {one}' for one in OTHERS]
    fields += [f'"id":{one}1{one},{one}"account"{one}:"a"{one}' for one in SPACES]
    twice = (
        '"n": null, "n": 3',
        '"n": 3, "n": null',
        '"note": "a", "note": null',
        '"n": 1, "n": 2',
    )
    return fields + [f'"id": 1, "account": "a", {one}' for one in twice]


@pytest.mark.parametrize("fields", _odd_fields())
def test_each_odd_record_becomes_the_same_row_or_the_same_error(fields: str) -> None:
    odd = f"{{{fields}}}".encode("utf-8", "surrogateescape")
    _require_same([odd])
    _require_same([PLAIN, odd, PLAIN])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.just(PLAIN) | _near_plain_values() | _odd_values(), min_size=1, max_size=4))
def test_records_become_the_same_rows_or_the_same_error(values: Sequence[bytes]) -> None:
    _require_same(values)


def test_plain_records_are_decoded_natively_and_others_are_left() -> None:
    decoder = open_native_json(SCHEMA)
    assert decoder is not None
    plain = [PLAIN] * ROWS_MIN
    decoded = decoder.decode(fetched(plain, b"\n"))
    assert decoded is not None
    assert [column.to_pylist()[0] for column in decoded] == [1, -2, "a", None]
    assert decoder.decode(fetched(plain[1:], b"\n")) is None
    for odd in (
        *(b'{"id": 1, "account": "\\n"}', b'{"id": 1, "account": "\xff"}', b'{"id": 1}'),
        *(b'{"id": 1, "id": 2, "account": "a"}', b'{"id": 1,\n"account": "a"}'),
        *(b'{"id": 1, "account": "a", "x": {}}', b'{"id": 1, "account": "a"} '),
    ):
        assert decoder.decode(fetched([*plain, odd], b"\n")) is None


@pytest.mark.parametrize("kind", [pa.float64(), pa.timestamp("us"), pa.uint64(), pa.bool_()])
def test_columns_of_other_types_have_no_native_decoder(kind: pa.DataType) -> None:
    assert open_native_json(pa.schema([pa.field("a", kind)])) is None


def test_rows_keep_their_order_where_both_decoders_take_turns() -> None:
    def values(first: int, account: str) -> list[bytes]:
        numbers = range(first, first + ROWS_MIN)
        return [json.dumps({"id": number, "account": account}).encode() for number in numbers]

    rows = JsonRows(settings_of(SCHEMA), by_split=True)
    for turn, account in enumerate(("a", 'quoted "b"', "c", "d", "\n")):
        rows.add(fetched(values(turn * ROWS_MIN, account), b"\n"))
    assert len(rows) == 5 * ROWS_MIN
    taken = rows.take()
    assert taken.column("id").to_pylist() == list(range(5 * ROWS_MIN))
    assert sum(count for _, count in rows.runs) == 5 * ROWS_MIN
    assert len(rows) == 0
    assert len(PARTITIONS) == len({split for split, _ in rows.runs})
    rows.add(fetched([PLAIN], b"\n"))
    assert rows.take().num_rows == 1
