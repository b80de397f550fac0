"""The process of Quix Streams' contestants, run by the Python of their own environment.

Arguments: WAY SERVERS TOPIC DATABASE_HOST DATABASE_PORT DATABASE STATE_DIRECTORY.
"""
# pyright: basic, reportMissingImports=false
# mypy: ignore-errors

from __future__ import annotations

import sys

from quixstreams import Application
from quixstreams.sinks.community.postgresql import PostgreSQLSink


def main(
    way: str, servers: str, topic: str, host: str, port: str, database: str, directory: str
) -> None:
    """Write payments and running totals until the process is killed."""
    session = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 2000}
    application = Application(
        broker_address=servers,
        consumer_group="scoreboard",
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=1.0,
        state_dir=directory,
        consumer_extra_config=session,
    )
    address = {
        "host": host,
        "port": int(port),
        "dbname": database,
        "user": "postgres",
        "password": "",
        "schema_auto_update": False,
        "include_metadata": False,
    }
    by_id = {"primary_key_columns": "id", "upsert_on_primary_key": True} if way == "upsert" else {}
    payments_table = PostgreSQLSink(table_name="payments", **by_id, **address)
    totals_table = PostgreSQLSink(
        table_name="totals",
        primary_key_columns="account",
        upsert_on_primary_key=True,
        **address,
    )
    payments = application.dataframe(application.topic(topic, value_deserializer="json"))

    def add(payment, state):
        total = state.get("total", 0) + payment["amount"]
        n = state.get("n", 0) + 1
        state.set("total", total)
        state.set("n", n)
        return {"account": payment["account"], "total": total, "n": n}

    payments.sink(payments_table)
    payments.apply(add, stateful=True).sink(totals_table)
    application.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
