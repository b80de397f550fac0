"""The dataflow of Bytewax's contestants, run by `python -m bytewax.run` in their environment.

Variables: SCOREBOARD_WAY, SCOREBOARD_SERVERS, SCOREBOARD_TOPIC and SCOREBOARD_URL.
"""
# pyright: basic, reportMissingImports=false
# mypy: ignore-errors

from __future__ import annotations

import json
import os

import psycopg
from bytewax import operators as op
from bytewax.connectors.kafka import operators as kop
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition

INSERT = "INSERT INTO payments (id, account, amount, ts) VALUES (%s, %s, %s, %s)"
UPSERT = (
    f"{INSERT} ON CONFLICT (id) DO UPDATE SET account = EXCLUDED.account,"
    " amount = EXCLUDED.amount, ts = EXCLUDED.ts"
)
UPSERT_TOTAL = (
    "INSERT INTO totals (account, total, n) VALUES (%s, %s, %s) ON CONFLICT (account) DO UPDATE"
    " SET total = EXCLUDED.total, n = EXCLUDED.n"
)


class Table(DynamicSink):
    """A table that each worker writes batch by batch, one transaction a batch."""

    def __init__(self, statement):
        self._statement = statement

    def build(self, step_id, worker_index, worker_count):
        """Return the connection of a worker."""
        return Partition(self._statement)


class Partition(StatelessSinkPartition):
    """The connection of one worker."""

    def __init__(self, statement):
        self._statement = statement
        self._connection = psycopg.connect(os.environ["SCOREBOARD_URL"])

    def write_batch(self, items):
        """Write the rows in one transaction."""
        with self._connection.cursor() as cursor:
            cursor.executemany(self._statement, items)
        self._connection.commit()

    def close(self):
        """Close the connection."""
        self._connection.close()


def add(state, payment):
    """Return the new state of an account, and its row."""
    total, n = state or (0, 0)
    total, n = total + payment["amount"], n + 1
    return (total, n), (total, n)


flow = Dataflow("scoreboard")
records = kop.input(
    "records",
    flow,
    brokers=[os.environ["SCOREBOARD_SERVERS"]],
    topics=[os.environ["SCOREBOARD_TOPIC"]],
    batch_size=500,
)
op.map("raise", records.errs, lambda error: (_ for _ in ()).throw(RuntimeError(error)))
payments = op.map("decode", records.oks, lambda message: json.loads(message.value))
rows = op.map("row", payments, lambda p: (p["id"], p["account"], p["amount"], p["ts"]))
op.output("payments", rows, Table(UPSERT if os.environ["SCOREBOARD_WAY"] == "upsert" else INSERT))
totals = op.stateful_map("total", op.key_on("key", payments, lambda p: p["account"]), add)
total_rows = op.map("total-row", totals, lambda row: (row[0], *row[1]))
op.output("totals", total_rows, Table(UPSERT_TOTAL))
