"""A timeout for each key: tells which accounts have been quiet for a while, and since when."""

from __future__ import annotations

import pyarrow as pa

from onceflow import KeyedFunction, Record, StateAccess, Timer, ValueStateDescriptor


class QuietAccounts(KeyedFunction):
    """Emits an account once nothing has come for it for `timeout_ms`, by the slot's clock."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return account and the time from which on it is quiet."""
        return pa.schema([input_schema.field("account"), pa.field("quiet_since_ms", pa.int64())])

    def open(self, state: StateAccess) -> None:
        """Take hold of the account's last record and of its timers."""
        self.last = state.value_state(ValueStateDescriptor("last", int))
        self.timers = state.timers()

    def process(self, record: Record) -> None:
        """Wait anew for this account."""
        if self.last.get() is not None:
            self.timers.delete_processing_time_timer(self.last.get() + self.timeout_ms)
        self.last.set(self.timers.current_processing_time())
        self.timers.register_processing_time_timer(self.last.get() + self.timeout_ms)

    def on_timer(self, timer: Timer) -> Record:
        """Tell it, and forget the account."""
        self.last.clear()
        return {"account": timer.key, "quiet_since_ms": timer.at_ms - self.timeout_ms}
