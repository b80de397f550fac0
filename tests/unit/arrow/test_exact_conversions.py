"""Tests that only core/arrow uses Arrow's own casts and readers, which alter some values silently.

Arrow multiplies decimals past their bits, reads decimals of a CSV field without a look at their
precision, and cuts off what does not fit when it is told `safe=False`. So the product converts by
`cast_rows`, `cast_exactly`, `array_of` and `exact_array`, and a cast to a type that stands there
may be Arrow's own unless that is a decimal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("cli", "clients", "connectors", "core", "formats", "integration", "sinks", "sources")
CHECKED_WAYS = "core/arrow/"
READERS = {
    "formats/csv_rows.py": "reads decimals as text, and looks for other altered numbers",
    "clients/mysql/rows.py": "reads decimals as text; a server wrote the rest",
}
MAKERS = {
    "formats/json/columns.py": "int64, for a converter of numbers",
    "formats/protobuf/decoder.py": "Protobuf has no decimals",
    "connectors/spark/readers/state.py": "JSON text, or bytes",
    "core/spi/dead_letters.py": "the columns of dead letters: text, bytes and numbers",
    "core/state/keys/key_codec.py": "keys of text, bytes and integers",
    "core/state/rocksdb/accumulators.py": "bytes",
    "core/state/rocksdb/snapshots.py": "bytes",
    "sinks/kafka/encoder.py": "headers: text and bytes",
    "clients/mysql/types.py": "the members of an ENUM",
    "sinks/sql/changes.py": "values that were read from a column of the same type",
    "formats/debezium/changes.py": "text and bytes",
    "sources/kafka/value_formats.py": "headers: text and bytes",
}
"""Files that let pyarrow make arrays of a type that does not stand there, and what type it is."""
UNSAFE = {
    "core/state/readers/state_columns.py": "Spark has no nanoseconds: keys are shown without",
    "formats/debezium/changes.py": "compares numbers with the bytes of a placeholder",
}

CASTS = {
    "core/state/readers/state_columns.py": UNSAFE["core/state/readers/state_columns.py"],
    "sinks/lake/writer.py": "a method of the product's own",
}
WORDS = re.compile(r"\bcast\(|\barray\(|(?:read|open)_(?:csv|json)|safe=|from_pandas")


def uses(source: str) -> Iterator[tuple[str, int]]:
    """Yield what a module does that only `core/arrow` may do, with its line."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = node.func.value, node.func.attr
        module = owner.id if isinstance(owner, ast.Name) else ""
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(keyword.arg == "safe" for keyword in node.keywords):
            yield "safe=", node.lineno
        if name in {"read_csv", "open_csv", "read_json", "open_json"} and module != "pd":
            yield "reader", node.lineno
        if (module, name) in {("pc", "cast"), ("Array", "from_pandas")} or name == "from_pandas":
            yield "cast", node.lineno
        is_of_ours = module == "self" or (isinstance(owner, ast.Call) and is_super(owner))
        is_bytes = len(given) == 1 and isinstance(given[0], ast.Constant)
        if name == "cast" and not is_of_ours and not is_bytes and not is_written_out(given[0]):
            yield "cast", node.lineno
        if (module, name) == ("pa", "array") and len(given) > 1 and not is_empty(given[0]):
            kinds = [
                *node.args[1:2],
                *(keyword.value for keyword in node.keywords if keyword.arg == "type"),
            ]
            if not all(map(is_written_out, kinds)):
                yield "array", node.lineno


def is_super(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "super"


def is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.List) and not node.elts


def is_written_out(kind: ast.expr) -> bool:
    """Return whether a type stands there as a call such as `pa.int64()`, and is no decimal."""
    if not (isinstance(kind, ast.Call) and isinstance(kind.func, ast.Attribute)):
        return False
    return not any(
        isinstance(node, ast.Attribute) and node.attr.startswith("decimal")
        for node in ast.walk(kind)
    )


@cache
def uses_of_product() -> tuple[tuple[str, str, int], ...]:
    """Return each use outside of core/arrow: what it is, its file and its line."""
    found: list[tuple[str, str, int]] = []
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        # Most files hold none of these words, and need not be parsed.
        if not name.startswith(CHECKED_WAYS) and WORDS.search(source):
            found += [(what, name, line) for what, line in uses(source)]
    return tuple(found)


def test_values_are_converted_by_the_checked_ways_alone() -> None:
    allowed = {"reader": READERS, "array": MAKERS, "safe=": UNSAFE, "cast": CASTS}
    strange = [use for use in uses_of_product() if use[1] not in allowed[use[0]]]
    assert not strange, "use cast_rows, cast_exactly, array_of or exact_array of core/arrow"


def test_no_file_is_listed_that_needs_no_exception() -> None:
    found = {use[:2] for use in uses_of_product()}
    for what, files in (("reader", READERS), ("array", MAKERS), ("safe=", UNSAFE), ("cast", CASTS)):
        assert {(what, name) for name in files} <= found


@pytest.mark.parametrize(
    "source",
    [
        "column.cast(kind)",
        "rows.cast(schema)",
        "column.cast(pa.decimal128(5, 2))",
        "column.cast(pa.list_(pa.decimal128(5, 2)))",
        "column.cast(pa.int64(), safe=False)",
        "pc.cast(column, kind)",
        "csv.read_csv(text)",
        "pa.array(values, kind)",
        "pa.array(values, type=field.type)",
        "pa.array(values, pa.decimal128(5, 2))",
        "pa.Array.from_pandas(series, type=kind)",
    ],
)
def test_an_unchecked_conversion_is_found(source: str) -> None:
    assert list(uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "column.cast(pa.int64())",
        "column.cast(pa.timestamp('us', zone))",
        "pa.array([], kind)",
        "pa.array(values, pa.string())",
        "cast('Any', column)",
        "memoryview(octets).cast('B')",
        "self.cast(rows)",
    ],
)
def test_a_conversion_that_alters_nothing_is_let_through(source: str) -> None:
    assert not list(uses(source))
