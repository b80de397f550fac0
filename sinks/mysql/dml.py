r"""The statements that write rows of one table, and the checks of what the server accepted.

Inserts use LOAD DATA if the server allows it. LOAD DATA LOCAL turns every error into a warning, and
continues without the row or with another value in it. So a reply counts only if all rows were
accepted without a warning.

A reply is read when the next rows are sent, or at the end. So the server processes rows while this
process formats the next ones, and a refused row is reported one statement later.

Rows are part of the statement or in a file. If rows are found by key, they are a derived table in
front of a STRAIGHT_JOIN, so that the server goes through them and looks each one up in the unique
index. A full scan of the target would wait for rows of other transactions.

If MySQL inserts or updates many rows by key, they are sent column by column. Each column is one
literal, from which the server cuts the values: for values formatted row by row it creates an object
each. Columns are formatted one by one and joined by Arrow's own kernels, without a Python object
per value.

    file        1<tab>it's<tab>00FF<tab><newline>   null is \N, bytes are hex; the last field is
                                                    empty and dropped
    statement   (1,'it''s',x'00FF'),(2,NULL,NULL)
    columns     '12', 'it''s', x'00FF', '01'        numbers in one width; start and length of
                                                    values and marks of nulls in further columns
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.clients.mysql.catalog import TEXTS, identifier, quote
from onceflow.clients.mysql.connection import MySQLSession, Reply, own, to_sql_error
from onceflow.clients.mysql.types import MySQLFit, Spelling, fits_of
from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import Target
from onceflow.sinks.sql.dialect import DmlExecutor, InsertStream
from onceflow.sinks.sql.write_mode import WriteMode


@dataclass(frozen=True, slots=True)
class RowsStatement:
    """A statement with a place for the rows that it writes."""

    before: bytes
    after: bytes = b""
    row_word: str = ""
    """The word before the parenthesis of each row."""

    def __call__(self, fits: Sequence[MySQLFit], rows: pa.RecordBatch) -> bytes:
        """Return the statement that writes `rows`. `fits` converts the values."""
        return b"".join((self.before, value_rows(fits, rows, word=self.row_word), self.after))


@dataclass(frozen=True, slots=True)
class ColumnsStatement:
    """An INSERT … ON DUPLICATE KEY UPDATE for MySQL that receives its rows column by column.

    The rows are processed in the order in which they were given:

        INSERT INTO t (id, name)
        WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < 1)
        SELECT SUBSTR(given.c0, n * 2 + 1, 2), CONVERT(SUBSTR(given.c1, n * 1 + 1, 1) USING utf8mb4)
        FROM (SELECT _binary' 812' AS c0, _binary'ab' AS c1) AS given STRAIGHT_JOIN numbers
        WHERE TRUE ON DUPLICATE KEY UPDATE name = CONVERT(… USING utf8mb4)
    """

    target: Target
    changes: tuple[int, ...]
    """The positions of the columns that are set if a row with the key exists."""
    unchanged: str
    """The assignment that is used if there are no such columns."""
    few: RowsStatement
    """The statement that is used for a few rows, and for wide ones."""

    def __call__(self, fits: Sequence[MySQLFit], rows: pa.RecordBatch) -> bytes:
        """Return the statement that writes `rows`. `fits` converts the values."""
        if rows.num_rows < COLUMN_ROWS_MIN or len(fits) > COLUMNS_MAX:
            return self.few(fits, rows)
        given = GivenColumns(self._free_name("given"), self._free_name("numbers"))
        values = [given.cut_values(*pair) for pair in zip(fits, rows.columns, strict=True)]
        assigned = ", ".join(
            f"{quote(fits[number].name)} = {values[number]}" for number in self.changes
        )
        numbers = given.numbers
        return b"".join(
            (
                f"{_insert_into(self.target)} WITH RECURSIVE {numbers} (n) AS (SELECT 0 UNION ALL "
                f"SELECT n + 1 FROM {numbers} WHERE n < {rows.num_rows - 1}) "
                f"SELECT {', '.join(values)} FROM (SELECT ".encode(),
                *given.literals(),
                f") AS {given.name} STRAIGHT_JOIN {numbers} "
                # Without WHERE TRUE the parser would take ON for the join's condition.
                f"WHERE TRUE ON DUPLICATE KEY UPDATE {assigned or self.unchanged}".encode(),
            )
        )

    def _free_name(self, name: str) -> str:
        """Return `name`, or another name if the table has that name: both are in scope."""
        return f"{name}_rows" if self.target.name.name.lower() == name else name


# A text is compared with a TIME character by character: 12:00:00.000000 is not 12:00:00.000.
_TEMPORALS = {
    "date": "DATE",
    "datetime": "DATETIME(6)",
    "timestamp": "DATETIME(6)",
    "time": "TIME(6)",
}


def load_statement(target: Target) -> str:
    """Return the LOAD DATA statement for a file of `file_lines`.

    LOCAL turns errors into warnings.
    """
    targets: list[str] = []
    assigned: list[str] = []
    for number, fit in enumerate(fits_of(target)):
        match fit.spelling:
            case Spelling.HEX:
                assigned.append(f"{quote(fit.name)} = UNHEX(@c{number})")
                targets.append(f"@c{number}")
            case Spelling.BITS:
                assigned.append(f"{quote(fit.name)} = CAST(@c{number} AS UNSIGNED)")
                targets.append(f"@c{number}")
            case Spelling.NUMBER | Spelling.QUOTED | Spelling.TEXT:
                targets.append(quote(fit.name))
    targets.append("@end_of_line")
    return (
        f"LOAD DATA LOCAL INFILE 'rows' INTO TABLE {identifier(target.name)} CHARACTER SET utf8mb4 "
        "FIELDS TERMINATED BY '\\t' ESCAPED BY '\\\\' LINES TERMINATED BY '\\n' "
        f"({', '.join(targets)}){' SET ' if assigned else ''}{', '.join(assigned)}"
    )


def insert_statement(target: Target) -> RowsStatement:
    """Return the INSERT statement for many rows."""
    return RowsStatement(f"{_insert_into(target)} VALUES ".encode())


def put_statements(
    target: Target, mode: WriteMode, key: Sequence[str], *, mariadb: bool
) -> tuple[RowsStatement | ColumnsStatement, ...]:
    """Return the statements that write rows by `key`, in order; none if nothing would change."""
    others = [number for number, fit in enumerate(fits_of(target)) if fit.name not in key]
    if mode is WriteMode.UPDATE:
        return (update_statement(target, key, mariadb=mariadb),) if others else ()
    changes = others if mode is WriteMode.UPSERT else []
    if len(target.table.unique_keys) == 1 and not target.table.other_unique:
        by_rows = _on_duplicate_key(target, key, changes, mariadb=mariadb)
        if mariadb:
            return (by_rows,)
        return (ColumnsStatement(target, tuple(changes), _keep_row(target, key), by_rows),)
    # ON DUPLICATE KEY matches any unique index, so it could change the row of another key.
    update = (update_statement(target, key, mariadb=mariadb),) if changes else ()
    return (*update, _insert_absent(target, key, mariadb=mariadb))


def delete_statement(target: Target, key: Sequence[str], *, mariadb: bool) -> RowsStatement:
    """Return the statement that deletes the rows of the given keys."""
    fits = fits_of(target, key)
    tail = _join_table(target, key, fits)
    return _around_rows(fits, "DELETE FROM t USING ", tail, mariadb=mariadb)


def _on_duplicate_key(
    target: Target, key: Sequence[str], others: Sequence[int], *, mariadb: bool
) -> RowsStatement:
    names = [target.fits[number].name for number in others]
    new = "VALUES({})" if mariadb else "new_row.{}"
    assigned = ", ".join(f"{quote(name)} = {new.format(quote(name))}" for name in names)
    tail = f" ON DUPLICATE KEY UPDATE {assigned or _keep_row(target, key)}"
    tail = tail if mariadb else f" AS new_row{tail}"
    return RowsStatement(f"{_insert_into(target)} VALUES ".encode(), tail.encode())


def _keep_row(target: Target, key: Sequence[str]) -> str:
    """Return an assignment that leaves a row unchanged."""
    return f"{quote(key[0])} = {identifier(target.name)}.{quote(key[0])}"


def count_statement(target: Target, key: Sequence[str], *, mariadb: bool) -> RowsStatement:
    """Return the statement that counts and locks the rows of the given keys.

    The server counts only the rows that an UPDATE changes.
    """
    fits = fits_of(target, key)
    tail = f"{_join_table(target, key, fits)} FOR UPDATE"
    return _around_rows(fits, "SELECT COUNT(*) FROM ", tail, mariadb=mariadb)


def update_statement(target: Target, key: Sequence[str], *, mariadb: bool) -> RowsStatement:
    """Return the statement that sets the columns of existing rows outside their key."""
    fits = fits_of(target)
    assigned = ", ".join(
        f"t.{quote(fit.name)} = r.c{number}"
        for number, fit in enumerate(fits)
        if fit.name not in key
    )
    tail = f"{_join_table(target, key, fits)} SET {assigned}"
    return _around_rows(fits, "UPDATE ", tail, mariadb=mariadb)


def _join_table(target: Target, key: Sequence[str], fits: Sequence[MySQLFit]) -> str:
    """Return the clause that joins rows with the columns of `fits` to the table's rows by key."""
    numbers = [number for number, fit in enumerate(fits) if fit.name in key]
    return f" STRAIGHT_JOIN {_name_with_index(target, key)} ON {_same(fits, numbers)}"


def _insert_absent(target: Target, key: Sequence[str], *, mariadb: bool) -> RowsStatement:
    fits = fits_of(target)
    columns = ", ".join(f"r.c{number}" for number in range(len(fits)))
    tail = (
        f" LEFT JOIN {_name_with_index(target, key)} ON {_same(fits, _numbers(target, key))} "
        f"WHERE t.{quote(key[0])} IS NULL"
    )
    head = f"{_insert_into(target)} SELECT {columns} FROM "
    return _around_rows(fits, head, tail, mariadb=mariadb)


def _insert_into(target: Target) -> str:
    columns = ", ".join(quote(fit.name) for fit in target.fits)
    return f"INSERT INTO {identifier(target.name)} ({columns})"


def _around_rows(fits: Sequence[MySQLFit], head: str, tail: str, *, mariadb: bool) -> RowsStatement:
    """Return a statement in which the rows are a table `r` with the columns c0, c1 and so on."""
    names = ", ".join(f"c{number}" for number in range(len(fits)))
    typed = ", ".join(_cast_for_index(number, fit) for number, fit in enumerate(fits))
    before = f"{head}(WITH given({names}) AS (VALUES ".encode()
    after = f") SELECT {typed} FROM given) AS r{tail}".encode()
    return RowsStatement(before, after, "" if mariadb else "ROW")


def _cast_for_index(number: int, fit: MySQLFit) -> str:
    """Return the column expression with the type that the index compares."""
    name, kind = f"c{number}", fit.type
    if fit.is_key and kind.name in _TEMPORALS:
        return f"CAST({name} AS {_TEMPORALS[kind.name]}) AS {name}"
    if fit.is_key and kind.name == "decimal":
        return f"CAST({name} AS DECIMAL({kind.precision},{kind.scale})) AS {name}"
    return name


def _same(fits: Sequence[MySQLFit], numbers: Sequence[int]) -> str:
    return " AND ".join(
        f"t.{quote(fits[number].name)} = {_collate(number, fits[number])}" for number in numbers
    )


def _collate(number: int, fit: MySQLFit) -> str:
    kind = fit.type
    if kind.name in TEXTS and kind.collation:
        return f"CONVERT(r.c{number} USING {kind.charset}) COLLATE {kind.collation}"
    return f"r.c{number}"


def _numbers(target: Target, key: Sequence[str]) -> list[int]:
    return [number for number, fit in enumerate(fits_of(target)) if fit.name in key]


def _name_with_index(target: Target, key: Sequence[str]) -> str:
    index = target.table.index_over(key)
    hint = f" FORCE INDEX ({quote(index)})" if index else ""
    return f"{identifier(target.name)} AS t{hint}"


def file_lines(fits: Sequence[MySQLFit], rows: pa.RecordBatch) -> memoryview:
    """Return `rows`, which are converted by `fits`, as lines of a file."""
    fields = [_field(*pair) for pair in zip(fits, rows.columns, strict=True)]
    return _read_bytes(pc.binary_join_element_wise(*fields, _NEWLINE, _TAB))


def value_rows(fits: Sequence[MySQLFit], rows: pa.RecordBatch, *, word: str = "") -> memoryview:
    """Return `rows`, which are converted by `fits`, in parentheses, each after `word`."""
    values = [_value(*pair) for pair in zip(fits, rows.columns, strict=True)]
    joined = values[0] if len(values) == 1 else pc.binary_join_element_wise(*values, _COMMA)
    whole = pc.binary_join_element_wise(_text(f"{word}("), joined, _text("),"), _text(""))
    return _read_bytes(whole)[:-1]


class GivenColumns:
    """The columns of a statement as literals, and the expressions of their values in row `n`."""

    def __init__(self, name: str, numbers: str) -> None:
        """Hold no column yet; `name` is the table of literals, `numbers` the table of `n`."""
        self.name = name
        self.numbers = numbers
        self._literals: list[tuple[bytes, bytes | memoryview]] = []

    def literals(self) -> Iterator[bytes | memoryview]:
        """Yield the literals as a list of columns, in pieces."""
        for number, (kind, data) in enumerate(self._literals):
            yield b"%s%s'" % (b", " if number else b"", kind)
            yield data
            yield b"' AS c%d" % number

    def cut_values(self, fit: MySQLFit, column: pa.Array) -> str:
        """Add `column`, which is converted by `fit`.

        Return the expression of its value in row `n`.
        """
        if column.null_count == len(column):
            return "NULL"
        match fit.spelling:
            case Spelling.TEXT:
                # This replaces whole characters: in UTF-8, neither byte occurs inside another
                # character.
                data = bytes(_read_bytes(column)).replace(b"\\", b"\\\\").replace(b"'", b"''")
                value = f"CONVERT({self._cut_parts(_BINARY, data, column)} USING utf8mb4)"
            case Spelling.HEX:
                value = self._cut_parts(b"x", binascii.hexlify(_read_bytes(column)), column)
            case Spelling.BITS:
                value = f"CAST({self._cut_padded(_to_text(column))} AS UNSIGNED)"
            case Spelling.NUMBER | Spelling.QUOTED:
                value = self._cut_padded(_to_text(column))
        if not column.null_count:
            return value
        is_null = self._cut_padded(_to_text(column.is_null()))
        return f"IF({is_null} = '1', NULL, {value})"

    def _cut_padded(self, texts: pa.Array) -> str:
        """Add numbers or dates, padded to the longest; the server skips the spaces."""
        if texts.null_count:
            texts = pc.fill_null(texts, _text(""))
        lengths = _read_lengths(texts)
        width = int(lengths.max())
        if lengths.min() < width:
            texts = pc.utf8_lpad(texts, width, " ")
        return self._cut(self._add(_BINARY, _read_bytes(texts)), width)

    def _cut_parts(self, kind: bytes, data: bytes, column: pa.Array) -> str:
        """Add values of any length, with their start positions and lengths."""
        lengths = _read_lengths(column)
        literal = self._add(kind, data)
        if lengths.min() == lengths.max():
            return self._cut(literal, int(lengths[0]))
        firsts = np.concatenate(([1], lengths[:-1])).cumsum()
        first, length = (
            self._cut_padded(_to_text(pa.array(numbers))) for numbers in (firsts, lengths)
        )
        return f"SUBSTR({literal}, {first}, {length})"

    def _add(self, kind: bytes, data: bytes | memoryview) -> str:
        self._literals.append((kind, data))
        return f"{self.name}.c{len(self._literals) - 1}"

    def _cut(self, literal: str, width: int) -> str:
        return f"SUBSTR({literal}, {self.numbers}.n * {width} + 1, {width})"


def _field(fit: MySQLFit, column: pa.Array) -> pa.Array:
    match fit.spelling:
        case Spelling.TEXT:
            column = _escape_for_file(column)
        case Spelling.HEX:
            column = _hex(column)
        case Spelling.NUMBER | Spelling.BITS | Spelling.QUOTED:
            column = _to_text(column)
    return column if not column.null_count else pc.fill_null(column, _text("\\N"))


def _value(fit: MySQLFit, column: pa.Array) -> pa.Array:
    match fit.spelling:
        case Spelling.TEXT:
            column = _between("'", _escape_for_sql(column))
        case Spelling.HEX:
            # MariaDB keeps the rest by 65,536 of a longer literal's length in a derived table.
            is_long = (pc.max(pc.binary_length(column)).as_py() or 0) > _LITERAL_BYTES_MAX
            before, after = ("UNHEX('", "')") if is_long else ("x'", "'")
            column = _between(before, _hex(column), after)
        case Spelling.QUOTED:
            column = _between("'", _to_text(column))
        case Spelling.NUMBER | Spelling.BITS:
            column = _literals(column)
    return column if not column.null_count else pc.fill_null(column, _text("NULL"))


def _literals(numbers: pa.Array) -> pa.Array:
    """Return numbers as SQL literals; -0 would be an integer, which has no negative zero."""
    texts = _to_text(numbers)
    if not arrow.is_floating(numbers.type):
        return texts
    literals: pa.Array = pc.if_else(pc.equal(texts, _text("-0")), _text("-0e0"), texts)
    return literals


def _to_text(column: pa.Array) -> pa.Array:
    if arrow.is_timestamp(column.type) and column.type.tz:
        # The microseconds are in UTC, in whatever zone they are shown.
        column = column.view(pa.int64()).cast(pa.timestamp("us"))
    elif arrow.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif arrow.is_float32(column.type):
        # The shortest float32 text of the largest float would be out of range.
        column = column.cast(pa.float64())
    return column.cast(pa.large_string())


def _between(before: str, column: pa.Array, after: str = "'") -> pa.Array:
    joined: pa.Array = pc.binary_join_element_wise(_text(before), column, _text(after), _text(""))
    return joined


def _escape_for_file(column: pa.Array) -> pa.Array:
    data = _read_data(column)
    for plain, escaped in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n")):
        if plain.encode() in data:
            column = pc.replace_substring(column, plain, escaped)
    return column.cast(pa.large_string())


def _escape_for_sql(column: pa.Array) -> pa.Array:
    data = _read_data(column)
    for plain, escaped in (("\\", "\\\\"), ("'", "''")):
        if plain.encode() in data:
            column = pc.replace_substring(column, plain, escaped)
    return column.cast(pa.large_string())


def _hex(column: pa.Array) -> pa.Array:
    """Return the bytes of each value as hexadecimal digits; converts the whole data at once."""
    validity, offsets, data = column.buffers()
    if offsets is None:
        return pa.array([None] * len(column), pa.large_string())
    count = column.offset + len(column) + 1
    bounds = np.frombuffer(memoryview(offsets), dtype=np.int64, count=count)[column.offset :]
    first, last = int(bounds[0]), int(bounds[-1])
    digits = b"" if data is None else binascii.hexlify(data.slice(first, last - first))
    moved = pa.py_buffer(((bounds - first) * 2).tobytes())
    every = pa.Array.from_buffers(
        pa.large_string(), len(column), [None, moved, pa.py_buffer(digits)]
    )
    if validity is None or not column.null_count:
        return every
    result: pa.Array = pc.if_else(column.is_valid(), every, _text(None))
    return result


def _read_data(column: pa.Array) -> bytes:
    """Return the bytes of all values, possibly also of nulls."""
    if arrow.is_string(column.type):
        column = column.cast(pa.large_string())
    return bytes(_read_bytes(column))


def _read_bytes(column: pa.Array) -> memoryview:
    """Return the bytes of all values, concatenated."""
    data = column.buffers()[2]
    if data is None or not len(column):
        return memoryview(b"")
    bounds = _read_bounds(column)
    return memoryview(data)[int(bounds[0]) : int(bounds[-1])]


def _read_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the number of bytes of each value of a column of large texts or bytes."""
    return np.diff(_read_bounds(column))


def _read_bounds(column: pa.Array) -> NDArray[np.int64]:
    """Return the start of each value in the data, and the end of the last one."""
    offsets = column.buffers()[1]
    if offsets is None:
        return np.zeros(len(column) + 1, np.int64)
    count = column.offset + len(column) + 1
    return np.frombuffer(memoryview(offsets), dtype=np.int64, count=count)[column.offset :]


def _text(value: str | None) -> pa.Scalar:
    # `pa.scalar` would import pandas if it is installed, which takes a worker longer than all its
    # other imports together.
    if value is None:
        return pa.nulls(1, pa.large_string())[0]
    data = value.encode()
    bounds = struct.pack("=qq", 0, len(data))
    array = pa.Array.from_buffers(
        pa.large_string(), 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    return array[0]


_BINARY = b"_binary"
_TAB, _NEWLINE, _COMMA = _text("\t"), _text("\n"), _text(",")


ROWS_A_STATEMENT = 10_000
BYTES_A_STATEMENT = 1 << 20
"""The size of values in a statement; formatted they may take twice as much. See also `spell`."""

COLUMN_ROWS_MIN = 1_000
"""The number of rows from which MySQL receives columns; at 500 there was no gain."""
COLUMNS_MAX = 60
"""The largest number of columns. Each takes up to four literals, which are columns of a one-row
table of the server. On disk that is an InnoDB table, with 8,126 bytes per row and 20 bytes for each
long value."""

_LITERAL_BYTES_MAX = 65_535
"""The longest literal of bytes that every server keeps whole in a derived table."""

# Warnings about the statement's form in the binary log, and about deprecated words.
_HARMLESS = frozenset({1287, 1592, 1681})


class PipelinedInserts(InsertStream):
    """A stream that sends one statement after another, and awaits at most one reply."""

    def __init__(self, target: Target, *, local_infile: bool) -> None:
        """Send nothing yet."""
        self._fits = fits_of(target)
        self._load = load_statement(target) if local_infile else None
        self._insert = insert_statement(target)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._awaited = 0

    @override
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_rows >= ROWS_A_STATEMENT or self._waiting_bytes >= BYTES_A_STATEMENT:
            self._send_waiting(own(begin()))

    @override
    def finish(self, session: Session) -> None:
        self._send_waiting(own(session))
        self._settle(own(session))

    @override
    def give_up(self) -> None:
        self._waiting.clear()
        self._awaited = 0

    def _send_waiting(self, session: MySQLSession) -> None:
        if not self._waiting:
            return
        rows = pa.concat_batches(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        for part in statement_sized(rows):
            self._send(session, part)
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0

    def _send(self, session: MySQLSession, rows: pa.RecordBatch) -> None:
        if self._load is not None:
            lines = file_lines(self._fits, rows)
            self._settle(session)
            session.send(self._load, [lines])
        else:
            for part, statement in spell(session, self._insert, self._fits, rows):
                self._settle(session)
                session.send(statement)
                self._awaited = part.num_rows
            return
        self._awaited = rows.num_rows

    def _settle(self, session: MySQLSession) -> None:
        """Raise unless the server accepted all sent rows unchanged."""
        awaited, self._awaited = self._awaited, 0
        if awaited:
            _require_taken(session, session.receive(), awaited)


def execute_checked(session: MySQLSession, statement: bytes) -> None:
    """Carry out `statement`, which may change any number of rows but must not warn.

    Raises:
        SqlError: The server refused the statement, or warns.
    """
    session.send(statement)
    _require_taken(session, session.receive(), None)


def _execute_all(
    session: MySQLSession, statement: RowsStatement, fits: Sequence[MySQLFit], rows: pa.RecordBatch
) -> None:
    for _, spelled in spell(session, statement, fits, rows):
        execute_checked(session, spelled)


def statement_sized(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows into parts of a size that one statement can carry."""
    parts = max(1, -(-rows.nbytes // BYTES_A_STATEMENT))
    size = max(1, min(ROWS_A_STATEMENT, -(-rows.num_rows // parts)))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)


def spell(
    session: MySQLSession,
    statement: Callable[[Sequence[MySQLFit], pa.RecordBatch], bytes],
    fits: Sequence[MySQLFit],
    rows: pa.RecordBatch,
) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    """Yield parts of `rows` with their statements, which fit the server's limit or have one row."""
    spelled = statement(fits, rows)
    if len(spelled) <= session.statement_bytes_max or rows.num_rows == 1:
        yield rows, spelled
        return
    half = rows.num_rows // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from spell(session, statement, fits, part)


def _require_taken(session: MySQLSession, reply: Reply, rows: int | None) -> None:
    """Raise unless `reply` says that `rows` rows were accepted, without a warning.

    Raises:
        SqlError: The number and text are those of the first warning.
    """
    if reply.warnings:
        for _, number, text in session.query("SHOW WARNINGS"):
            if int(number) not in _HARMLESS:
                raise to_sql_error(int(number), str(text))
    if rows is not None and reply.rows != rows:
        raise to_sql_error(1261, f"{rows} rows were sent, and the server took {reply.rows}")


class MySQLDmlExecutor(DmlExecutor):
    """The executor of MySQL: LOAD DATA or INSERT for inserts, other statements for changes."""

    def __init__(self, mode: WriteMode, key: Sequence[str], *, local_infile: bool) -> None:
        """Send nothing yet; `key` may be empty for inserts."""
        super().__init__(mode, key)
        self._local_infile = local_infile

    @override
    def inserts(self, target: Target) -> PipelinedInserts:
        return PipelinedInserts(target, local_infile=self._local_infile)

    @override
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        connection, fits = own(session), fits_of(target)
        statements = put_statements(target, self.mode, self.key, mariadb=connection.is_mariadb)
        is_awaited = False
        for part in statement_sized(rows):
            for statement in statements:
                # Format the next statement while the server processes the previous one.
                for _, spelled in spell(connection, statement, fits, part):
                    if is_awaited:
                        _require_taken(connection, connection.receive(), None)
                    connection.send(spelled)
                    is_awaited = True
        if is_awaited:
            _require_taken(connection, connection.receive(), None)

    @override
    def update(self, session: Session, target: Target, rows: pa.RecordBatch) -> int:
        connection, fits, keys = own(session), fits_of(target), fits_of(target, self.key)
        count = count_statement(target, self.key, mariadb=connection.is_mariadb)
        statement = update_statement(target, self.key, mariadb=connection.is_mariadb)
        has_others = len(fits) > len(keys)
        row_count = 0
        for part in statement_sized(rows):
            for _, spelled in spell(connection, count, keys, part.select(list(self.key))):
                ((number,),) = connection.query(spelled.decode())
                row_count += int(number)
            if has_others:
                _execute_all(connection, statement, fits, part)
        return row_count

    @override
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        connection, fits = own(session), fits_of(target, self.key)
        statement = delete_statement(target, self.key, mariadb=connection.is_mariadb)
        for part in statement_sized(rows.select(list(self.key))):
            _execute_all(connection, statement, fits, part)
