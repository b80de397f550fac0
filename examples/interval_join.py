"""Payments with the shop's orders that they are for: those of the same account, shortly before.

Both streams have event time, and a pair is made when the second of the two comes. Either waits in
keyed state as long as the other may still come: an order for a minute of event time, a payment for
as long as orders are behind. A payment that event time has passed goes to a side output.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from onceflow import OutputTag, ProcessJoinFunction, Record, Stream

PAID_WITHIN = "1 min"


class PaidOrder(ProcessJoinFunction):
    """Tells of each order and payment of the same amount how long the customer took."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the columns of a paid order."""
        numbers = ("order_id", "payment_id", "took_ms")
        return pa.schema([("account", pa.string()), *((name, pa.int64()) for name in numbers)])

    def process(self, left: Record, right: Record) -> Iterator[Record]:
        """Take an order and a payment of one account that came at most a minute later."""
        if left["amount"] == right["amount"]:
            yield {
                "account": left["account"],
                "order_id": left["id"],
                "payment_id": right["id"],
                "took_ms": right["ts"] - left["ts"],
            }


def paid(orders: Stream, payments: Stream) -> tuple[Stream, Stream]:
    """Return the orders that were paid in time, each pair once, and payments that came late."""
    late = OutputTag("late-payments", payments.schema)
    pairs = orders.key_by("account").interval_join(
        payments.key_by("account"), left_time="ts", right_time="ts", late_right=late
    )
    made = pairs.between(0, PAID_WITHIN).process(PaidOrder(), uid="paid")
    return made, made.side_output(late)
