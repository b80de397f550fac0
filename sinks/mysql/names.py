"""Names and values as SQL text, under the modes that every session here is given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.sql.tables import TableName

_FORMAT_ID = int.from_bytes(b"once", "big")
_QUALIFIER_LENGTH_MAX = 64
_BYTES_OF_HASH = 16


def quoted(name: str) -> str:
    """Return `name` as an identifier."""
    return f"`{name.replace('`', '``')}`"


def literal(value: str | int | None) -> str:
    """Return `value` as SQL; backslashes escape, because no session here says otherwise."""
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def identifier(table: TableName) -> str:
    """Return a table's name, quoted."""
    return f"{quoted(table.schema)}.{quoted(table.name)}" if table.schema else quoted(table.name)


@dataclass(frozen=True, slots=True)
class XaNames:
    """The names under which one ledger's transactions and sessions are known to the server.

    XA ids belong to the whole server and say nothing of databases. So the branch qualifier tells
    the ledger's database: two jobs of one sink id in two databases never touch each other's.
    """

    ledger_database: str

    @property
    def qualifier(self) -> str:
        """The bqual of all ids: the database, or its hash where it is not 64 bytes of ASCII."""
        name = self.ledger_database
        plain = name.isascii() and name.isprintable() and len(name) <= _QUALIFIER_LENGTH_MAX
        return name if plain else _hashed(name)

    def xid(self, transaction: TransactionId) -> str:
        """Return the id as XA statements take it."""
        return f"{literal(str(transaction))},{literal(self.qualifier)},{_FORMAT_ID}"

    def parsed(self, format_id: int, gtrid_bytes: int, data: bytes) -> TransactionId | None:
        """Return the transaction that XA RECOVER lists so; None when it is not of this ledger."""
        if format_id != _FORMAT_ID or data[gtrid_bytes:] != self.qualifier.encode():
            return None
        return TransactionId.parse(data[:gtrid_bytes].decode("ascii", "replace"))

    def writers_lock(self, sink_id: str) -> str:
        """Return how the locks of all writers of a sink id begin; the subtask's number follows."""
        return f"onceflow/{_hashed(f'{self.ledger_database}/{sink_id}')}/"

    def owner_lock(self, transaction: TransactionId) -> str:
        """Return the lock held by the session that prepares `transaction`."""
        return f"onceflow/{_hashed(f'{self.ledger_database}/{transaction}')}"


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_BYTES_OF_HASH).hexdigest()
