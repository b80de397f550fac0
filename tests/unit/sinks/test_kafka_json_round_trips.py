"""The round-trip matrix of the Kafka sink's JSON: Python's own reader gets what was written.

A text of a time is read by a parser of this module, which knows neither the sink nor Python's
limits of years and microseconds.
"""

from __future__ import annotations

import base64
import json
import re
from datetime import date
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.support.edge_values import NESTED, SCALARS, EdgeColumn, parameters
from tests.support.exact_values import Clock, Day, Instant, Local, exact_values, same
from tests.unit.sinks.test_kafka_sink_records import encode

from onceflow.core.errors import ConfigError
from onceflow.core.spi import OnBadRow

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d(?:\.\d{1,9})?)(Z?)")
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_EPOCH = date(1970, 1, 1).toordinal()
_DAY_NS = 86_400 * 10**9


def read_clock(text: str) -> int:
    """Return the nanoseconds since midnight."""
    match = _CLOCK.fullmatch(text)
    assert match, text
    hours, minutes, seconds, fraction = match.groups()
    whole = (int(hours) * 60 + int(minutes)) * 60 + int(seconds)
    return whole * 10**9 + int((fraction or "").ljust(9, "0"))


def read_moment(text: str) -> object:
    """Return a timestamp in its exact form."""
    match = _MOMENT.fullmatch(text)
    assert match, text
    days = date.fromisoformat(match[1]).toordinal() - _EPOCH
    nanoseconds = days * _DAY_NS + read_clock(match[2])
    return (Instant if match[3] else Local)(nanoseconds)


def restore(read: Any, written: Any) -> object:
    """Return what was read in the form of what was written, as the documents say it is spelled."""
    if isinstance(written, dict):
        members = cast("dict[str, Any]", written)
        assert read.keys() == members.keys()
        return {name: restore(read[name], value) for name, value in members.items()}
    if isinstance(written, list):
        items: list[Any] = [*cast("Any", written)]
        assert len(read) == len(items)
        return [restore(*pair) for pair in zip(read, items, strict=True)]
    match written:
        case bytes():
            return base64.b64decode(read, validate=True)
        case Decimal():
            return Decimal(read)
        case Day():
            return Day(date.fromisoformat(read).toordinal() - _EPOCH)
        case Clock():
            return Clock(read_clock(read))
        case Local() | Instant():
            return read_moment(read)
        case _:
            return read


@pytest.mark.parametrize("edge", parameters([*SCALARS, *NESTED]))
def test_a_value_in_json_is_what_was_written_or_its_row_was_refused(edge: EdgeColumn) -> None:
    kept = pa.record_batch([pa.array(range(len(edge.values))), edge.values], names=["n", "x"])
    if any(word in str(edge.type) for word in ("duration", "interval")):
        with pytest.raises(ConfigError, match="column 'x"):
            encode(kept)
        return
    records, rejected = encode(kept, on_bad_row=OnBadRow.DROP)
    assert len(edge.values) == len(records) + sum(part.rows.num_rows for part in rejected)
    refused = {n for part in rejected for n in part.rows.column("n").to_pylist()}
    written = exact_values(edge.values)
    altered: list[str] = []
    for record in records:
        value = json.loads(record["value"])
        number = value["n"]
        assert number not in refused
        meant = written[number]
        shown = None if value["x"] is None else restore(value["x"], meant)
        if not same(shown, meant):
            altered.append(f"{meant!r} was read as {shown!r}")
    assert altered == []
    assert all(reason for part in rejected for reason in part.reasons)
