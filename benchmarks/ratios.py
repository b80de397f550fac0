"""Ratios of two figures of the same turn, which hold on every machine.

Every variant runs once in a turn before any runs again, so a slow turn slows both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.spread import Spread
from benchmarks.throughput import Measured

# Of the name of a variant, with the backend in place of {}.
_JOB_PAIRS = (
    ("exactly once / at least once, {}", "ledger, {}", "ledger at least once, {}"),
    ("staged rows / prepared transactions, {}", "ledger by staged rows, {}", "ledger, {}"),
    ("MySQL / Postgres, {}", "ledger into MySQL, {}", "ledger, {}"),
    ("MariaDB / Postgres, {}", "ledger into MariaDB, {}", "ledger, {}"),
    ("state in a bucket / in a directory, {}", "ledger with state in a bucket, {}", "ledger, {}"),
    ("unaligned / aligned, {}", "ledger with barriers that overtake, {}", "ledger, {}"),
    (
        "unaligned / aligned, to nowhere, {}",
        "generated to nowhere with barriers that overtake, {}",
        "generated to nowhere, {}",
    ),
)
_BACKENDS = ("heap", "rocksdb")


def ratios(jobs: Sequence[Measured]) -> dict[str, Spread]:
    """Return every ratio of rows/s whose two sides were measured, by name."""
    rates = {job.variant.name: list(job.rates) for job in jobs}
    found: dict[str, Spread] = {}

    def add(name: str, over: list[float] | None, under: list[float] | None) -> None:
        if over and under:
            found[name] = Spread.of(one / other for one, other in zip(over, under, strict=True))

    for backend in _BACKENDS:
        for name, over, under in _JOB_PAIRS:
            add(
                name.format(backend),
                rates.get(over.format(backend)),
                rates.get(under.format(backend)),
            )
    add("RocksDB / heap", rates.get("ledger, rocksdb"), rates.get("ledger, heap"))
    return found
