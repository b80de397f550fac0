"""A keyed function of your own: flags an account's payment that is far above its average so far."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from onceflow import KeyedFunction, Record, StateAccess, ValueStateDescriptor


@dataclass
class Average:
    """The values that are kept for each account."""

    payments: int = 0
    total: int = 0


class FlagOutliers(KeyedFunction):
    """Adds a column `outlier`: more than ten times the account's average before this payment."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the input's columns and `outlier`."""
        return input_schema.append(pa.field("outlier", pa.bool_()))

    def open(self, state: StateAccess) -> None:
        """Take hold of the account's average."""
        self.average = state.value_state(ValueStateDescriptor("average", Average))

    def process(self, record: Record) -> Record:
        """Compare the payment with the average, then add it to the average."""
        average = self.average.get() or Average()
        record["outlier"] = average.payments >= 10 and (
            record["amount"] * average.payments > 10 * average.total
        )
        self.average.set(Average(average.payments + 1, average.total + record["amount"]))
        return record
