"""The verdict of a judge.

A target has, for every payment, `id`, `account`, `amount`, the account's `balance` after it, and
`n`, its position among the account's payments (1, 2, 3 …). If an account's payments come from
several partitions, their order is not fixed. `n` records the actual order, so the chain can be
checked without knowing the order:

    the rows of an account, by n:   n = n of the row before + 1           (0 before the first)
                                    balance = balance before + amount     (0 before the first)
"""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.core.errors import OnceflowError
from onceflow.integration.workload import Payments


class NoVerdict(OnceflowError):
    """Raised when the target could not be read."""

    domain = "external"
    retry = "never"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict. `ok` is True if the target has every payment once and no other row."""

    records: int
    """The number of payments that were produced."""
    rows: int
    """The number of rows in the target."""
    duplicates: int
    """The number of rows beyond the first of their id."""
    missing: int
    """The number of ids that were produced and have no row."""
    unexpected: int
    """The number of ids in the target that were never produced."""
    wrong_balances: int
    """The number of rows that do not continue their account's chain."""
    altered: bool
    """True if every id is there once, but an account or an amount differs from the produced one."""
    in_doubt: int
    """The number of transactions that are neither committed nor rolled back."""

    @property
    def ok(self) -> bool:
        """True if all counts are as expected."""
        return self.rows == self.records and not any(
            (
                self.duplicates,
                self.missing,
                self.unexpected,
                self.wrong_balances,
                self.altered,
                self.in_doubt,
            )
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The counts from a target of any kind."""

    rows: int
    ids: int
    """The number of distinct ids. A row without an id counts as a row, but not as an id."""
    expected_ids: int
    """The number of distinct ids in the target that were produced."""
    digest: int
    """The digest of all rows, computed like `Payments.digest`."""
    wrong_balances: int
    in_doubt: int

    def judge(self, payments: Payments) -> Verdict:
        """Return the verdict after a run over `payments`."""
        complete = self.rows == self.ids == self.expected_ids == payments.records
        return Verdict(
            records=payments.records,
            rows=self.rows,
            duplicates=self.rows - self.ids,
            missing=payments.records - self.expected_ids,
            unexpected=self.ids - self.expected_ids,
            wrong_balances=self.wrong_balances,
            altered=complete and self.digest != payments.digest(),
            in_doubt=self.in_doubt,
        )
