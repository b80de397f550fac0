"""The interface of the formats, which decode batches of consumed values to columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

if TYPE_CHECKING:  # formats are imported where no client of Kafka is installed, too
    from confluent_kafka import Message


def describe_position(message: Message) -> str:
    """Return the topic, partition and offset of `message`, for messages to users."""
    return f"{message.topic()}-{message.partition()} offset {message.offset()}"


_call_headers: Callable[[Message], Sequence[tuple[str, bytes | None]] | None]
_call_headers = methodcaller("headers")
"""`Message.headers`, called so that Python checks the result.

For a name that is not UTF-8 the client returns a list with an empty slot, and also sets an
exception. Python notices this if the call comes from C code. In a specialized call from Python code
it does not, and a loop over that list ends the process.
"""


def read_headers(message: Message) -> Sequence[tuple[str, bytes | None]] | None:
    """Return the headers of `message`, or None if it has none.

    Raises:
        ValueError: The name of a header is not UTF-8. After that `message` has an empty list.
    """
    try:
        return _call_headers(message)
    except (SystemError, UnicodeDecodeError) as error:
        # The client keeps the invalid list, and would return it in every later call.
        message.set_headers([])
        raise ValueError("the name of a header is not text in UTF-8") from error


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows that some values became, and the faults of the others."""

    columns: Sequence[pa.Array]
    """The columns. Each is an array with one value for each of `kept`."""
    kept: Sequence[int]
    """The indices of the values that became rows, ascending.

    The index repeats for a value with several rows.
    """
    faults: Mapping[int, str]
    """The reasons why values became no rows, by index.

    Values in neither `kept` nor `faults` are skipped.
    """

    def drop_rows(self, faults: Mapping[int, str]) -> Decoded:
        """Return the rows without those in `faults`, which has the reason for each row.

        If a value became several rows, all of them are dropped.
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
    """A decoder of values to columns."""

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Fetch what `values` of `messages` need, because they will be decoded later."""
        ...

    def ready(self) -> bool:
        """Return True if all expected values can be decoded now.

        Raises:
            SourceUnavailable: A needed schema did not arrive within the deadline.
            ConfigError: The request for a schema is refused.
        """
        ...

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return the rows of `values`, which belong to `messages`."""
        ...


class PlainDecoder:
    """A decoder that needs nothing except the values."""

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Do nothing, because there is nothing to fetch."""

    def ready(self) -> bool:
        """Return True."""
        return True
