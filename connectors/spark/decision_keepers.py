"""Chooses where the decisions of a sink's batches are kept."""

from __future__ import annotations

from onceflow.connectors.spark.batch_commits import BatchTarget
from onceflow.connectors.spark.batch_identity import NamedTarget
from onceflow.core.batch_decisions import BatchDecisions
from onceflow.core.config import Delivery
from onceflow.core.errors import ConfigError
from onceflow.sinks.sql.batch_decisions import SqlBatchDecisions
from onceflow.sinks.sql.sink import SqlSink


def kept_target(named: NamedTarget) -> tuple[BatchTarget, BatchDecisions]:
    """Return the target and its keeper: its own database where it is one, else a log in files.

    Raises:
        ConfigError: There is neither, or the sink is told to write at least once.
    """
    target, sink = named.target, named.target.sink
    if isinstance(sink, SqlSink):
        if sink.delivery != Delivery.EXACTLY_ONCE.value:
            raise ConfigError(f"{sink}: as a format of Spark a sink is always exactly_once")
        return target, SqlBatchDecisions(sink.settings, target.sink_id, target.owner)
    raise ConfigError(f"{type(sink).__name__} keeps no decisions")
