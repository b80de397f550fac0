"""The rows that every sink is given: the payments, with each account's balance after them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from onceflow.integration.workload import Payments

BATCH_ROWS = 10_000
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
        pa.field("balance", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Rows:
    """The result of one workload, in memory, in the order of the ids."""

    payments: Payments
    batches: tuple[pa.RecordBatch, ...] = field(repr=False)

    @classmethod
    def of(cls, payments: Payments) -> Rows:
        """Return the rows that a right job would write."""
        chunks = list(payments.chunks())
        ids = np.concatenate([chunk.ids for chunk in chunks])
        accounts = np.concatenate([chunk.accounts for chunk in chunks])
        amounts = np.concatenate([chunk.amounts for chunk in chunks])
        balance, n = _running(accounts, amounts)
        table = pa.Table.from_arrays(
            [
                pa.array(ids),
                pa.array([f"acct-{account:06d}" for account in accounts.tolist()]),
                pa.array(amounts),
                pa.array(ids + 1_767_225_600_000),
                pa.array(balance),
                pa.array(n),
            ],
            schema=SCHEMA,
        )
        return cls(payments, tuple(table.to_batches(max_chunksize=BATCH_ROWS)))

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.payments.records

    @cached_property
    def latest(self) -> tuple[int, int, int]:
        """The number of accounts, and sum of `n` and sum of `balance` over their last rows."""
        chunks = list(self.payments.chunks())
        accounts = len(np.unique(np.concatenate([chunk.accounts for chunk in chunks])))
        return accounts, self.count, sum(int(chunk.amounts.sum()) for chunk in chunks)


def _running(
    accounts: np.ndarray[tuple[int], np.dtype[np.int64]],
    amounts: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return each row's running sum and count within its account."""
    order = np.argsort(accounts, kind="stable")
    grouped = accounts[order]
    begins = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[begins, len(grouped)])
    sums = np.cumsum(amounts[order])
    base = np.repeat(sums[begins] - amounts[order][begins], lengths)
    balance, n = np.empty_like(amounts), np.empty_like(amounts)
    balance[order] = sums - base
    n[order] = np.arange(len(grouped)) - np.repeat(begins, lengths) + 1
    return balance, n
