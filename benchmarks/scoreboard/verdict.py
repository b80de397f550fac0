"""The verdict on both tables, by plain SQL, against the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import psycopg

from benchmarks.scoreboard.records import Model

PREPARED_AGE_S = 5
"""The age from which a prepared transaction counts as left over. Checkpoints come each second."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences between the tables and the model."""

    expected: int
    lost: int
    """Payments whose id is missing."""
    doubled: int
    """Rows beyond the first one of each id."""
    altered: int
    """Ids whose rows have another account or amount, and ids that were never sent."""
    wrong_totals: int | None
    """Accounts whose total or count is wrong or missing, or None if no totals were written."""
    prepared: int
    """Prepared transactions that nothing has ended."""

    @property
    def is_exact(self) -> bool:
        """True if both tables hold what they must hold and no transaction is left."""
        return not (self.lost or self.doubled or self.altered or self.wrong_totals or self.prepared)


def judge_payments(model: Model, rows: Iterable[tuple[int, str, int]]) -> tuple[int, int, int]:
    """Return the lost, doubled and altered payments among the rows (id, account, amount)."""
    copies: Counter[int] = Counter()
    altered: set[int] = set()
    for id_, account, amount in rows:
        copies[id_] += 1
        if model.payments.get(id_) != (account, amount):
            altered.add(id_)
    lost = sum(id_ not in copies for id_ in model.payments)
    doubled = copies.total() - len(copies)
    return lost, doubled, len(altered)


def judge_totals(model: Model, rows: Iterable[tuple[str, int, int]]) -> int:
    """Return the number of accounts whose row (account, total, count) differs from the model."""
    found = {account: (total, n) for account, total, n in rows}
    return sum(found.get(account) != model.totals.get(account) for account in found | model.totals)


def is_complete(url: str, model: Model, *, has_totals: bool) -> bool:
    """Return True if no payment is missing, and all totals have their last value."""
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT count(DISTINCT id) FROM payments").fetchone()
        if found is None or found[0] < len(model.payments):
            return False
        return not has_totals or not judge_totals(
            model, connection.execute("SELECT account, total, n FROM totals")
        )


def has_caught_up(url: str, model: Model) -> bool:
    """Return True if the last payment of each partition is visible.

    Payments that are missing then are lost. Before that they may only be late.
    """
    with psycopg.connect(url) as connection:
        seen = connection.execute(
            "SELECT count(DISTINCT id) FROM payments WHERE id = ANY(%s)", (list(model.last_ids),)
        ).fetchone()
    return seen is not None and seen[0] == len(model.last_ids)


def judge(url: str, model: Model, *, has_totals: bool) -> Verdict:
    """Return the verdict on the tables of the database at `url`."""
    with psycopg.connect(url) as connection:
        lost, doubled, altered = judge_payments(
            model, connection.execute("SELECT id, account, amount FROM payments")
        )
        wrong = None
        if has_totals:
            wrong = judge_totals(model, connection.execute("SELECT account, total, n FROM totals"))
        prepared = connection.execute(
            "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
            " AND prepared < now() - make_interval(secs => %s)",
            (PREPARED_AGE_S,),
        ).fetchone()
    return Verdict(
        len(model.payments), lost, doubled, altered, wrong, prepared[0] if prepared else 0
    )
