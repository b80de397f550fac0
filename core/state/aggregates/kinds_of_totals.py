"""The kind of totals of each kind of aggregate."""

from __future__ import annotations

from onceflow.core.state.aggregates.byte_values import BytesTotals
from onceflow.core.state.aggregates.chosen_values import ChosenValues
from onceflow.core.state.aggregates.totals import Totals
from onceflow.core.state.aggregates.wide_totals import wide_totals_of
from onceflow.core.state.api.descriptors import AccumulatorColumn


def totals_of(column: AccumulatorColumn) -> Totals:
    """Return empty totals for a column."""
    if column.has_bytes:
        return BytesTotals(column) if column.op == "last" else ChosenValues(column)
    return wide_totals_of(column) or Totals(column)
