"""The running balance as a user would write it record by record, with two values a key."""

from __future__ import annotations

import pyarrow as pa

from onceflow import KeyedFunction, Record, StateAccess, ValueStateDescriptor

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
