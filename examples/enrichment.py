"""Payments with the limit of their account's tier, where tiers and limits may change at any time.

Two streams say what a payment is joined with. Accounts come by key: an account's tier is its keyed
state, and payments wait there for it. Limits are few and concern all accounts: they are broadcast,
and every subtask has all of them. Both are in each checkpoint, so after a crash a payment meets the
tier and the limits that it would have met without it, or newer ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from onceflow import (
    BroadcastAccess,
    BroadcastProcessFunction,
    CoProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Record,
    StateAccess,
    Stream,
    ValueStateDescriptor,
)

LIMITS = MapStateDescriptor[str, int]("limits", str, int)
"""By tier."""


class WithTier(CoProcessFunction):
    """Adds the account's tier to each payment, once it is known."""

    def output_schema(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return a payment's columns and its tier."""
        return first.append(pa.field("tier", pa.string()))

    def open(self, state: StateAccess) -> None:
        """Take hold of the account's tier, and of payments that wait for it."""
        self.tier = state.value_state(ValueStateDescriptor("tier", str))
        self.waiting = state.list_state(ListStateDescriptor("waiting", dict))

    def process_1(self, record: Record) -> Record | None:
        """Pass a payment on, or let it wait."""
        tier = self.tier.get()
        if tier is not None:
            return record | {"tier": tier}
        self.waiting.add(record)
        return None

    def process_2(self, record: Record) -> Iterator[Record]:
        """Take in an account's tier, and let go what has waited for it."""
        self.tier.set(record["tier"])
        for payment in self.waiting.get():
            yield payment | {"tier": record["tier"]}
        self.waiting.clear()


class WithinLimit(BroadcastProcessFunction):
    """Tells whether a payment is within the limit of its tier, as far as one is known."""

    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        """Return a payment's columns and the answer."""
        return records.append(pa.field("within_limit", pa.bool_()))

    def open(self, state: BroadcastAccess) -> None:
        """Take hold of the limits."""
        self.limits = state.broadcast_state(LIMITS)

    def process(self, record: Record) -> Record:
        """Look the payment's tier up; here the limits can only be read."""
        limit = self.limits.get(record["tier"])
        return record | {"within_limit": None if limit is None else record["amount"] <= limit}

    def process_broadcast(self, record: Record) -> None:
        """Take in a limit. Every subtask does."""
        self.limits.put(record["tier"], record["limit"])


def enrich(payments: Stream, accounts: Stream, limits: Stream) -> Stream:
    """Return `payments` with tier and `within_limit`; each exactly once."""
    tiers = payments.connect(accounts).key_by("account", "account").process(WithTier(), uid="tiers")
    return tiers.connect(limits.broadcast(LIMITS)).process(WithinLimit(), uid="limits")
