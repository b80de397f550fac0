"""The batches that replace all rows of a table: `mode("overwrite")`, and output mode `complete`.

The rows are staged. The transaction that decides the batch deletes the old rows and adds the new
ones. So a reader sees either the old rows or the new rows, and a repeated batch deletes no rows.
"""

from __future__ import annotations

from dataclasses import replace

from onceflow.connectors.spark.batch.identity import NamedTarget
from onceflow.core.errors import ConfigError
from onceflow.core.spi import Sink
from onceflow.sinks.sql.sink import SqlSink

_REPLACING_MODES = ("insert", "upsert")


def check_replaces(sink: Sink, mode: str, *, is_staged: bool) -> SqlSink:
    """Return `sink` if it can replace all rows of its table in one step. Asks no server.

    Raises:
        ConfigError: The sink cannot. The message names `mode`, the setting that asks for it, and an
            alternative.
    """
    if not isinstance(sink, SqlSink):
        raise ConfigError(
            f"{mode}: {type(sink).__name__} cannot delete what is there and add the new rows in one"
            f" step. {sink.instead_of_replacing}"
        )
    if sink.commit_mode == "two_phase":
        raise ConfigError(
            f"{mode}: the old rows are deleted and the new ones added by one transaction, and"
            " commitMode=two_phase has one for each partition. Leave commitMode out; rows then wait"
            " in stagingLocation"
        )
    if sink.table_column is not None:
        raise ConfigError(
            f"{mode}: with tableColumn nobody says which tables are to be replaced. Write each"
            " table by itself"
        )
    if sink.write_mode not in _REPLACING_MODES:
        raise ConfigError(
            f"{mode}: writeMode={sink.write_mode} goes by the rows that are there, and they are"
            f" replaced. Use writeMode {' or '.join(_REPLACING_MODES)}"
        )
    if not is_staged:
        raise ConfigError(
            f"{mode}: the new rows wait in files until one transaction replaces the old ones. Give"
            " option stagingLocation: a directory, or the URL of a bucket, that driver and"
            " executors see"
        )
    return sink


def replace_rows(named: NamedTarget, mode: str) -> NamedTarget:
    """Return `named` as a target where each batch replaces all rows.

    Errors name the setting `mode`.

    Raises:
        ConfigError: The target cannot replace all rows in one step.
    """
    sink = check_replaces(named.target.sink, mode, is_staged=named.target.staging is not None)
    staged = replace(sink, commit_mode="ledger")
    return replace(named, target=replace(named.target, sink=staged, replaces=True))
