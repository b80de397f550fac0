"""The rows of a COPY are gathered while they come, but never for long and never without bound."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest

from onceflow.clients.postgres.binary_rows import RowBuffer
from onceflow.clients.postgres.connection import receive_copied


class _Arrivals:
    """The side of libpq: rows come with each `consume_input`, or not at all."""

    def __init__(self, *arrivals: tuple[bytes, ...]) -> None:
        self._arrivals = deque(arrivals)
        self._rows: deque[bytes] = deque()

    def get_copy_data(self, _: int) -> tuple[int, memoryview]:
        if not self._rows:
            return 0, memoryview(b"")
        row = self._rows.popleft()
        return len(row), memoryview(row)

    def consume_input(self) -> None:
        self._rows.extend(self._arrivals.popleft())


def _receive(arrivals: _Arrivals, rows_max: int, *ready: int) -> RowBuffer:
    """Return the rows that are received if the socket is `ready` or not, one wait after another."""
    receiving = receive_copied(cast("Any", arrivals), rows_max)
    next(receiving)
    with pytest.raises(StopIteration) as ended:
        for is_ready in ready:
            receiving.send(is_ready)
    rows: RowBuffer
    rows, is_last = ended.value.value
    assert not is_last
    return rows


def test_rows_of_several_arrivals_are_returned_together() -> None:
    arrivals = _Arrivals((b"a", b"bc"), (b"def",))
    rows = _receive(arrivals, 3, 1, 1)
    assert rows.sizes == [1, 2, 3]
    assert bytes(rows.data[16:]) == b"abcdef"


def test_rows_are_returned_if_no_more_come() -> None:
    rows = _receive(_Arrivals((b"a", b"bc"), (b"d",)), 10, 0, 0, 1, 0)
    assert rows.sizes == [1, 2]


def test_no_more_rows_than_the_maximum_are_returned_and_the_others_stay() -> None:
    arrivals = _Arrivals((b"a", b"bc", b"def"))
    assert _receive(arrivals, 2, 1).sizes == [1, 2]
    assert arrivals.get_copy_data(1)[0] == 3


def test_large_rows_are_returned_before_the_maximum() -> None:
    row = bytes(5_000_000)
    rows = _receive(_Arrivals((row,), (row,), (row,)), 10, 1, 1)
    assert rows.sizes == [5_000_000] * 2


def test_rows_that_come_slowly_are_returned_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("onceflow.clients.postgres.connection.time.monotonic", lambda: now[0])
    receiving = receive_copied(cast("Any", _Arrivals((b"a",), (b"b",), (b"c",))), 10)
    next(receiving)
    receiving.send(1)
    now[0] = 0.2
    with pytest.raises(StopIteration) as ended:
        receiving.send(1)
    assert ended.value.value[0].sizes == [1, 1]
