"""The running balance as a user would write it, with two values a key: by record and by batch."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from onceflow import (
    BatchStates,
    KeyedBatch,
    KeyedBatchFunction,
    KeyedFunction,
    Record,
    StateAccess,
    ValueStateDescriptor,
)

_BALANCE = ValueStateDescriptor[int]("balance", int, default=0)
_PAYMENTS = ValueStateDescriptor[int]("payments", int, default=0)


class KeyedBalance(KeyedFunction):
    """Adds `balance` and `n`, as `running(balance=sum_("amount"), n=count())` does."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("balance", pa.int64())).append(
            pa.field("n", pa.int64())
        )

    def open(self, state: StateAccess) -> None:
        self._balance = state.value_state(_BALANCE)
        self._payments = state.value_state(_PAYMENTS)

    def process(self, record: Record) -> Record:
        balance = self._balance.get() + record["amount"]
        n = self._payments.get() + 1
        self._balance.set(balance)
        self._payments.set(n)
        record["balance"] = balance
        record["n"] = n
        return record


class BatchBalance(KeyedBatchFunction):
    """Adds the same, a batch at a time."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return KeyedBalance().output_schema(input_schema)

    def open(self, state: BatchStates) -> None:
        self._balance = state.value_state(_BALANCE)
        self._payments = state.value_state(_PAYMENTS)

    def process(self, batch: KeyedBatch) -> pa.RecordBatch:
        amounts = batch.sort_by_key("amount")
        sums = np.cumsum(amounts)
        before = sums[batch.firsts] - amounts[batch.firsts]
        sums += batch.spread(self._balance.get_many().to_numpy() - before)
        self._balance.put_many(batch.lasts(sums))
        counts = np.arange(1, len(sums) + 1)
        counts += batch.spread(self._payments.get_many().to_numpy() - batch.firsts)
        self._payments.put_many(batch.lasts(counts))
        with_sums = batch.rows.append_column("balance", pa.array(batch.in_row_order(sums)))
        return with_sums.append_column("n", pa.array(batch.in_row_order(counts)))
