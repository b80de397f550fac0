"""What each format implements: the values of consumed messages to columns, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Protocol

import pyarrow as pa
from confluent_kafka import Message


def describe_position(message: Message) -> str:
    """Return topic, partition and offset of `message`, for messages to users."""
    return f"{message.topic()}-{message.partition()} offset {message.offset()}"


_call_headers: Callable[[Message], Sequence[tuple[str, bytes | None]] | None]
_call_headers = methodcaller("headers")
"""`Message.headers`, called in a way in which Python checks the result.

For a name that is not UTF-8 the client returns a list with a hole and an exception. Python finds
that out in a call from C. It does not in a call from Python that it has made fast: a loop over that
list then ends the process.
"""


def read_headers(message: Message) -> Sequence[tuple[str, bytes | None]] | None:
    """Return the headers of `message`, or None if it has none.

    Raises:
        ValueError: The name of a header is not UTF-8. After that `message` has an empty list.
    """
    try:
        return _call_headers(message)
    except (SystemError, UnicodeDecodeError) as error:
        # The client keeps the list with the hole, and returns it for every later call.
        message.set_headers([])
        raise ValueError("the name of a header is not text in UTF-8") from error


@dataclass(frozen=True, slots=True)
class Decoded:
    """What some values became."""

    columns: Sequence[pa.Array]
    """One array a column, a value for each of `kept`."""
    kept: Sequence[int]
    """Places of the values that became rows, ascending; a value that is several rows repeats."""
    faults: Mapping[int, str]
    """Why a value became none, by its position. Values in neither of the two are passed over."""

    def drop_rows(self, faults: Mapping[int, str]) -> Decoded:
        """Return all but the rows of `faults`, which say why each is none.

        A value that became several rows loses all of them.
        """
        if not faults:
            return self
        bad = {self.kept[row] for row in faults}
        good = [row for row, at in enumerate(self.kept) if at not in bad]
        taken = pa.array(good, pa.int64())
        return Decoded(
            [column.take(taken) for column in self.columns],
            [self.kept[row] for row in good],
            {**self.faults, **{self.kept[row]: why for row, why in faults.items()}},
        )


class BatchDecoder(Protocol):
    """Turns values into columns."""

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Take note of `values` of `messages`, which will be decoded: fetch what that needs."""
        ...

    def ready(self) -> bool:
        """Return whether all that is expected can be decoded now.

        Raises:
            SourceUnavailable: What is needed did not come within the deadline.
            ConfigError: It is refused.
        """
        ...

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return what `values` of `messages` are."""
        ...


class PlainDecoder:
    """Needs nothing but the values."""

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Expect nothing: there is nothing to fetch."""

    def ready(self) -> bool:
        """Return True."""
        return True
