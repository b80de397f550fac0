"""What a judge answers.

A target has, for every payment, `id`, `account`, `amount`, the account's `balance` after it, and
`n`, its place in the account's own order (1, 2, 3 …). The order of one account's payments is not
fixed when they come from several partitions; whatever it was, `n` names it, so the chain can be
checked without knowing it:

    the rows of an account, by n:   n = n of the row before + 1           (0 before the first)
                                    balance = balance before + amount     (0 before the first)
"""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.core.errors import OnceflowError
from onceflow.integration.workload import Payments


class NoVerdict(OnceflowError):
    """Raised when the target did not say what it holds."""

    domain = "external"
    retry = "never"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says; `ok` when every payment is there once and nothing else is."""

    records: int
    """Payments produced."""
    rows: int
    """Rows in the target."""
    duplicates: int
    """Rows beyond the first of their id."""
    missing: int
    """Ids that were produced and have no row."""
    unexpected: int
    """Ids in the target that were never produced."""
    wrong_balances: int
    """Rows that do not continue their account's chain."""
    altered: bool
    """Every id is there once, but an account or an amount is not the one produced."""
    in_doubt: int
    """Transactions that are neither committed nor rolled back."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
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
    """What was counted in a target, by whatever language it speaks."""

    rows: int
    ids: int
    """Distinct ids; a row without one counts as a row and not as an id."""
    expected_ids: int
    """Distinct ids that were produced."""
    digest: int
    """As of `Payments.digest`, over all rows."""
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
