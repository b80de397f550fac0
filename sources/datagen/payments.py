"""Payments as a function of their number: record n is the same in every run, batch and order.

id       n
account  "acct-000123", uniform over `accounts`
amount   cents, -5000 to 94999
ts       epoch ms, one a record
"""

from __future__ import annotations

from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

PAYMENTS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
    ]
)

_AMOUNT_MIN = -5_000
_AMOUNT_COUNT = 100_000
_TS_FIRST = 1_700_000_000_000

_Words: TypeAlias = npt.NDArray[np.uint64]


class GeneratedPayments:
    """Makes payments from their numbers; holds the names of all accounts."""

    def __init__(self, *, seed: int, accounts: int) -> None:
        self._seed = np.uint64(seed & (2**64 - 1))
        self._accounts = accounts
        self._names = pa.array([f"acct-{index:06d}" for index in range(accounts)], pa.string())

    def batch(self, ids: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return the payments numbered `ids`, in that order."""
        words = _mixed(ids.view(np.uint64) ^ _mixed(np.full(1, self._seed, np.uint64)))
        accounts = (words % np.uint64(self._accounts)).view(np.int64)
        amounts = (_mixed(words) % np.uint64(_AMOUNT_COUNT)).view(np.int64) + _AMOUNT_MIN
        return pa.RecordBatch.from_arrays(
            [
                pa.array(ids),
                self._names.take(pa.array(accounts)),
                pa.array(amounts),
                pa.array(ids + _TS_FIRST),
            ],
            schema=PAYMENTS_SCHEMA,
        )


def _mixed(words: _Words) -> _Words:
    """SplitMix64's output function: a bijection whose bits all depend on all.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        mixed = words + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("_Words", mixed ^ (mixed >> np.uint64(31)))
