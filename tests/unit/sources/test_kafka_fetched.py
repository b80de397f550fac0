"""Records in buffers become the rows, letters and runs that the client's own objects become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from confluent_kafka import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sources.test_kafka_value_formats import settings_of

from onceflow.core.errors import BadRecord, InvariantViolation
from onceflow.core.spi import OnBadRow
from onceflow.sources.kafka.fetched import FetchedRecords, wrap_records
from onceflow.sources.kafka.messages import messages_of, sample_times
from onceflow.sources.kafka.settings import ValueFormat
from onceflow.sources.kafka.value_formats import JsonRows, RawRows

SCHEMA = "id BIGINT, account STRING, at TIMESTAMP"
PARTITIONS = [("payments", 0), ("refunds", 12)]
PIECES = (
    *("{", "}", "[", "]", "{}", "{}{}", "{}\n{}", '"', "\\", ",", ":", "\n", " ", "null", "1"),
    *('{"id":1}', '{"account":"', '{"more":[{}', "{}]}", '{"more":"}', '{"}', '"id"', "é"),
    *('{"at":"2026-01-01T00:00:00.1234567Z"}', '{"id":99999999999999999999}'),
)
VALUES = st.none() | st.lists(st.sampled_from(PIECES), max_size=4).map("".join).map(str.encode)


def fetched(values: Sequence[bytes | None], separator: bytes) -> FetchedRecords:
    """Return what the native reader would return of records with `values`."""
    texts = [(value or b"") + separator for value in values]
    keys = [None if at % 3 == 0 else b"k" * (at % 3) for at in range(len(values))]
    numbers = range(len(values))
    read = (
        *(b"".join(texts), _ends(texts), _present(values)),
        *(
            b"".join(key or b"" for key in keys),
            _ends([key or b"" for key in keys]),
            _present(keys),
        ),
        np.array([at // 2 % 2 for at in numbers], np.int32).tobytes(),
        np.array([at * 2 for at in numbers], np.int64).tobytes(),
        np.array([_time_of(at) for at in numbers], np.int64).tobytes(),
        np.array([at % 3 for at in numbers], np.int8).tobytes(),
        all(value is not None and value[:1] == b"{" and value[1:][-1:] == b"}" for value in values),
    )
    return wrap_records(read, PARTITIONS, separator)


def _time_of(number: int) -> int:
    # None that anybody's clock told, none that the protocol has, and microseconds for milliseconds.
    odd = {4: -1, 5: 1_700_000_000_000_000, 7: -(2**63)}
    return odd.get(number, number * 1000 if number % 3 else -1)


def _ends(texts: Sequence[bytes]) -> bytes:
    return np.array(list(accumulate(map(len, texts), initial=0)), np.int32).tobytes()


def _present(texts: Sequence[bytes | None]) -> bytes | None:
    present = np.array([text is not None for text in texts], np.bool_)
    return None if present.all() else present.tobytes()


@settings(deadline=None)
@given(st.lists(VALUES, max_size=8), st.booleans())
def test_json_in_buffers_is_the_same_rows_and_letters(
    values: list[bytes | None], include_metadata: bool
) -> None:
    described = settings_of(
        SCHEMA,
        on_bad_record=OnBadRow.DEAD_LETTER,
        include_metadata=include_metadata,
        topics=("payments", "refunds"),
    )
    together, one_by_one = (JsonRows(described, by_split=True) for _ in range(2))
    records = fetched(values, b"\n")
    together.add(records)
    one_by_one.add(list(messages_of(fetched(values, b"\n"))))
    assert together.take().equals(one_by_one.take())
    assert together.runs == one_by_one.runs
    assert together.refusals.letters == one_by_one.refusals.letters


def test_good_json_in_buffers_is_decoded_without_objects() -> None:
    rows = JsonRows(settings_of("id BIGINT", include_metadata=True))
    records = fetched([b'{"id":%d}' % number for number in range(4)], b"\n")
    rows.add(records)
    assert rows.take().column(0).to_pylist() == list(range(4))
    assert "messages" not in vars(records)


def test_halves_of_a_record_are_two_bad_records() -> None:
    for halves in (
        [b'{"more":[{}', b"{}]}", b"{}{}"],
        [b'{"account":"a}', b'{"}', b"{}{}"],
        [b'{"id":1', b'"account":"x"}', b"{}{}"],
    ):
        rows = JsonRows(settings_of(SCHEMA))
        with pytest.raises(BadRecord, match="payments-0 offset 0"):
            rows.add(fetched(halves, b"\n"))


@settings(deadline=None)
@given(st.lists(st.none() | st.binary(max_size=5), max_size=8))
def test_raw_records_in_buffers_are_the_same_rows(values: list[bytes | None]) -> None:
    described = settings_of(
        "x INT",
        format=ValueFormat.RAW,
        topics=("payments", "refunds"),
        on_bad_record=OnBadRow.DEAD_LETTER,
    )
    together, one_by_one = (RawRows(described, by_split=True) for _ in range(2))
    together.add(fetched(values, b""))
    one_by_one.add(list(messages_of(fetched(values, b""))))
    batch = together.take()
    batch.validate(full=True)
    assert batch.equals(one_by_one.take())
    assert together.runs == one_by_one.runs
    assert together.refusals.letters == one_by_one.refusals.letters
    assert {letter.offset for letter in together.refusals.letters} <= {10, 14}


def test_times_are_sampled_alike() -> None:
    records = fetched([b"{}"] * 1001, b"\n")
    assert sample_times(records) == sample_times(list(messages_of(records)))


def test_a_record_of_a_partition_that_nobody_asked_for_is_refused() -> None:
    read = (b"", bytes(8), None, b"", bytes(8), None, np.array([-1], np.int32).tobytes())
    with pytest.raises(InvariantViolation, match="not asked for"):
        wrap_records((*read, bytes(8), bytes(8), bytes(1), False), PARTITIONS, b"")


def test_records_that_follow_each_other_are_told_from_others_by_their_partition_and_order() -> None:
    mixed = fetched([b"{}"] * 4, b"\n")
    partition, other = PARTITIONS
    assert mixed.find_bounds(partition) is None
    first = np.array([0, 0, 0, 0], np.int32)
    alone = replace(mixed, indices=first)
    # A hole between two records is of markers.
    assert alone.find_bounds(partition) == (0, 6)
    assert alone.find_bounds(other) is None
    for offsets in ([4, 5, 3, 6], [4, 5, 5, 6]):
        disordered = replace(alone, offsets=np.array(offsets, np.int64))
        assert disordered.find_bounds(partition) is None


def test_messages_of_buffers_are_whole() -> None:
    message: Message = messages_of(fetched([b"a", None], b"\n"))[1]
    found = (message.topic(), message.partition(), message.offset(), message.key())
    assert found == ("payments", 0, 2, b"k")
    assert message.value() is None
    assert message.timestamp() == (1, 1000)
    assert message.error() is None
