"""Decoding without a broker: messages are real ones, built by hand."""

from __future__ import annotations

import datetime as dt
import decimal
import random
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import BadRecord, ConfigError
from onceflow.core.spi import OnBadRow
from onceflow.sources.kafka.settings import Earliest, KafkaSettings, ValueFormat
from onceflow.sources.kafka.value_formats import JsonRows, RawRows, schema_of_rows

UTC = dt.timezone.utc
I64 = 2**63


def settings_of(schema: SchemaLike, **given_settings: Any) -> KafkaSettings:
    settings: dict[str, Any] = {
        "bootstrap_servers": "nowhere:1",
        "topics": ("payments",),
        "format": ValueFormat.JSON,
        "columns": schema_of(schema),
        "starting": Earliest(),
        "ending": None,
        "on_bad_record": OnBadRow.FAIL,
        "include_metadata": False,
        "group_id": None,
        "commit_offsets": True,
        "fail_on_data_loss": True,
        "batch_rows": 10_000,
        "batch_bytes": 1 << 20,
        "deadline_s": 1.0,
        **given_settings,
    }
    return KafkaSettings(**settings)


def _messages(*values: bytes | None, first: int = 0) -> list[Message]:
    return [
        Message(topic="payments", partition=3, offset=first + 2 * index, value=value)
        for index, value in enumerate(values)
    ]


def _decoded(schema: SchemaLike, *values: bytes | None, **given_settings: Any) -> list[Any]:
    rows = JsonRows(settings_of(schema, **given_settings))
    rows.add(_messages(*values))
    found: list[Any] = rows.take().to_pylist()
    return found


def _fault(schema: SchemaLike, *values: bytes | None) -> str:
    with pytest.raises(BadRecord) as caught:
        _decoded(schema, *values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given_json", "expected"),
    [
        (pa.int8(), b"-128", -128),
        (pa.int16(), b"32767", 32767),
        (pa.int32(), b"-2147483648", -(2**31)),
        (pa.int64(), b"9223372036854775807", I64 - 1),
        (pa.uint8(), b"255", 255),
        (pa.uint64(), b"18446744073709551615", 2**64 - 1),
        (pa.float32(), b"0.5", 0.5),
        (pa.float32(), b"3.4028235677973362e38", 3.4028234663852886e38),
        (pa.float64(), b"1e300", 1e300),
        (pa.float64(), b"7", 7.0),
        (pa.bool_(), b"true", True),
        (pa.string(), '"zażółć \\u0000"'.encode(), "zażółć \x00"),
        (pa.large_string(), b'"x"', "x"),
        (pa.string_view(), b'"x"', "x"),
        (pa.binary(), b'"AP8="', b"\x00\xff"),
        (pa.dictionary(pa.int32(), pa.string()), b'"x"', "x"),
        (pa.decimal128(10, 2), b'"12.30"', decimal.Decimal("12.30")),
        (
            pa.decimal128(38, 20),
            b"0.10000000000000000001",
            decimal.Decimal("0.10000000000000000001"),
        ),
        (pa.decimal128(10, 2), b"5", decimal.Decimal("5.00")),
        (pa.date32(), b'"2024-02-29"', dt.date(2024, 2, 29)),
        (
            pa.timestamp("ms", "UTC"),
            b"1700000000123",
            dt.datetime(2023, 11, 14, 22, 13, 20, 123000, UTC),
        ),
        (
            pa.timestamp("us", "UTC"),
            b'"2024-01-02T03:04:05.000006+02:00"',
            dt.datetime(2024, 1, 2, 1, 4, 5, 6, UTC),
        ),
        (pa.timestamp("s"), b'"2024-01-02T03:04:05"', dt.datetime(2024, 1, 2, 3, 4, 5)),
        (pa.timestamp("us"), b"-1", dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
        (pa.list_(pa.int32()), b"[1, null, 3]", [1, None, 3]),
        (
            pa.struct([("a b", pa.int64()), ("c", pa.string())]),
            b'{"a b": 1, "z": 2}',
            {"a b": 1, "c": None},
        ),
        (pa.map_(pa.string(), pa.int64()), b'{"k": 1}', [("k", 1)]),
    ],
)
def test_value_of_every_type_arrives_exactly_and_null_stays_null(
    kind: pa.DataType, given_json: bytes, expected: object
) -> None:
    schema = pa.schema([pa.field("odd name", kind)])
    value = b'{"other": [1, {"x": 2}], "odd name": %s}' % given_json
    rows = _decoded(schema, value, b'{"odd name": null}', b"{}")
    assert [row["odd name"] for row in rows] == [expected, None, None]
    required = pa.schema([pa.field("odd name", kind, nullable=False)])
    assert _decoded(required, value) == [{"odd name": expected}]
    assert "payments-3 offset 2" in _fault(required, value, b'{"odd name": null}')
    assert "payments-3 offset 0" in _fault(required, b"{}")


@pytest.mark.parametrize(
    ("kind", "given_json", "fragment"),
    [
        (pa.int8(), b"128", "column 'x' (int8): Expected `int` <= 127"),
        (pa.uint8(), b"-1", "found -1"),
        (pa.int64(), str(I64).encode(), f"found {I64}"),
        (pa.uint64(), str(2**64).encode(), "cannot hold 18446744073709551616"),
        (pa.float32(), b"1e39", "found 1e+39"),
        (pa.float32(), b"3.4028235677973366e38", "found 3.4028235677973366e+38"),
        (pa.float32(), b"-3.4028235677973366e38", "found -3.4028235677973366e+38"),
        (pa.list_(pa.float32()), b"[3.4028235677973366e38]", "column 'x'"),
        (pa.int64(), b"true", "got `bool`"),
        (pa.int64(), b"1.0", "got `float`"),
        (pa.string(), b"1", "got `int`"),
        (pa.bool_(), b"1", "got `int`"),
        (pa.binary(), b'"!"', "Invalid base64"),
        (pa.decimal128(4, 2), b'"123.45"', "cannot hold 123.45"),
        (pa.decimal128(4, 2), b"1.005", "cannot hold 1.005"),
        (pa.decimal128(4, 2), b'"NaN"', "cannot hold NaN"),
        (pa.date32(), b'"2023-02-29"', "Invalid"),
        (pa.timestamp("ms", "UTC"), b'"2024-01-01T00:00:00"', "timezone"),
        (pa.timestamp("ms"), b'"2024-01-01T00:00:00Z"', "timezone"),
        (pa.timestamp("s"), b'"2024-01-01T00:00:00.5"', "cannot hold"),
        (pa.timestamp("ns"), b'"2500-01-01T00:00:00"', "cannot hold"),
        (pa.timestamp("us"), str(I64).encode(), f"found {I64}"),
        (pa.list_(pa.int8()), b"[1, 300]", "found [1, 300]"),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), b"[1, null]", "got `null`"),
        (pa.map_(pa.string(), pa.field("v", pa.int8(), nullable=False)), b'{"k":null}', "`null`"),
        (pa.list_(pa.timestamp("s")), b'["2024-01-01T00:00:00.5"]', "is finer than timestamp[s]"),
        (pa.map_(pa.string(), pa.timestamp("ms")), b'{"k": "2024-01-01T00:00:00.0001"}', "finer"),
        (
            pa.struct([("a", pa.timestamp("s"))]),
            b'{"a": "2024-01-01T00:00:00.5"}',
            "would lose data",
        ),
        (
            pa.struct([pa.field("a", pa.int8(), nullable=False)]),
            b"{}",
            "missing required field `a`",
        ),
        (pa.map_(pa.string(), pa.int8()), b'{"k": "v"}', "got `str`"),
    ],
)
def test_value_that_does_not_fit_its_column_is_refused_by_name(
    kind: pa.DataType, given_json: bytes, fragment: str
) -> None:
    text = _fault(pa.schema([pa.field("x", kind)]), b"{}", b'{"x": %s}' % given_json)
    assert text.startswith("payments-3 offset 2: ")
    assert fragment in text
    assert "on_bad_record='drop'" in text


def test_mixed_timestamps_of_one_column_are_all_exact() -> None:
    values = [b'{"t": 1500}', b'{"t": "1970-01-01T00:00:02.250Z"}', b"{}"]
    expected = [
        dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC),
        dt.datetime(1970, 1, 1, 0, 0, 2, 250_000, UTC),
        None,
    ]
    rows = _decoded({"t": pa.timestamp("ms", "UTC")}, *values)
    assert [row["t"] for row in rows] == expected
    assert "cannot hold 1970-01-01 00:00:02.25" in _fault({"t": pa.timestamp("s", "UTC")}, *values)


def test_each_digit_of_a_nanosecond_is_read_at_its_place() -> None:
    texts = (b"1234567", b"12345670", b"123456789", b"000000001")
    rows = JsonRows(settings_of({"t": pa.timestamp("ns", "UTC")}))
    rows.add(_messages(*(b'{"t": "1970-01-01T00:00:00.%sZ"}' % digits for digits in texts)))
    found = rows.take().column("t").cast(pa.int64()).to_pylist()
    assert found == [123_456_700, 123_456_700, 123_456_789, 1]


def test_newline_or_second_object_inside_a_value_never_shifts_rows() -> None:
    # Each pair is one object too many or too few if values were joined and split again.
    for bad in (b'{"id": 1}\n{"id": 2}', b'{"id": 1', b"\n", b'{"id": 1}{"id": 2}', b""):
        rows = JsonRows(settings_of("id BIGINT NOT NULL", on_bad_record=OnBadRow.DROP))
        rows.add(_messages(b'{"id": 0}', bad, b'{\n"id"\n:\n3\n}'))
        assert rows.take().to_pylist() == [{"id": 0}, {"id": 3}]
        assert rows.refusals.dropped_count == 1


def test_excerpt_of_a_bad_value_is_short_and_printable() -> None:
    text = _fault("id BIGINT", b'{"id": "\x1b[31m' + b"x" * 5000)
    assert "\x1b" not in text
    assert len(text) < 600
    assert "5013 bytes" in text


def test_deeply_nested_value_is_a_bad_record_and_not_a_crash() -> None:
    assert "payments-3 offset 0" in _fault("id BIGINT", b'{"x": ' + b"[" * 200_000)


def _priced(number: int, cents: int) -> tuple[bytes, int]:
    price = b"%d.%02d" % divmod(cents, 100)
    return b'{"id": %d, "price": "%s"}' % (number, price), number


@given(st.data())
def test_any_mix_of_good_and_bad_records_keeps_each_row_beside_its_offset(
    data: st.DataObject,
) -> None:
    good = st.builds(_priced, st.integers(-I64, I64 - 1), st.integers(0, 99_999))
    bad = st.sampled_from([None, b"", b"{", b'{"id": 1.5}', b'{"id": 9, "price": "1.005"}', b"[]"])
    chunks: list[list[tuple[bytes, int] | bytes | None]] = data.draw(
        st.lists(st.lists(st.one_of(good, bad), max_size=12), max_size=4)
    )
    rows = JsonRows(
        settings_of(
            "id BIGINT NOT NULL, price DECIMAL(5, 2)",
            on_bad_record=OnBadRow.DROP,
            include_metadata=True,
        )
    )
    expected: list[tuple[int, int]] = []
    bad_count = 0
    for index, chunk in enumerate(chunks):
        values = [item[0] if isinstance(item, tuple) else item for item in chunk]
        rows.add(_messages(*values, first=1000 * index))
        for place, item in enumerate(chunk):
            if isinstance(item, tuple):
                expected.append((item[1], 1000 * index + 2 * place))
            else:
                bad_count += 1
    found = rows.take().to_pylist()
    assert [(row["id"], row["_offset"]) for row in found] == expected
    assert rows.refusals.dropped_count == bad_count


def test_decoded_batches_agree_with_an_independent_decoder() -> None:
    rng = random.Random(20)
    schema = "id BIGINT NOT NULL, account STRING, amount INT, rate DOUBLE"
    wanted = [
        {
            "id": rng.randrange(-I64, I64),
            "account": rng.choice([None, "", "żółw", "acct-1", "a\nb"]),
            "amount": rng.choice([None, rng.randrange(-(2**31), 2**31)]),
            "rate": rng.choice([None, rng.random()]),
        }
        for _ in range(3000)
    ]
    assert _decoded(schema, *map(msgspec.json.encode, wanted)) == wanted


def test_taking_a_batch_leaves_nothing_behind() -> None:
    rows = JsonRows(settings_of("id BIGINT"))
    rows.add(_messages(b'{"id": 1}'))
    assert (len(rows), rows.take().num_rows) == (1, 1)
    assert (len(rows), rows.size_bytes, rows.take().num_rows) == (0, 0, 0)


def test_raw_rows_keep_bytes_and_place() -> None:
    rows = RawRows(settings_of("x INT", format=ValueFormat.RAW))
    rows.add(_messages(b"\x00", None))
    batch = rows.take()
    assert batch.schema.equals(schema_of_rows(settings_of("x INT", format=ValueFormat.RAW)))
    assert batch.column("value").to_pylist() == [b"\x00", None]
    assert batch.column("offset").to_pylist() == [0, 2]


def test_type_that_json_cannot_fill_is_refused_when_the_source_is_built() -> None:
    full_soon, of_instants = (pa.int8(), pa.string()), (pa.int32(), pa.timestamp("us"))
    for kind in (
        *(pa.duration("s"), pa.time64("us"), pa.map_(pa.int32(), pa.int32()), pa.null()),
        *(pa.dictionary(*full_soon), pa.dictionary(*of_instants)),
    ):
        with pytest.raises(ConfigError, match="column 'x'"):
            JsonRows(settings_of(pa.schema([pa.field("x", kind)])))
