"""Options of `onceflow-kafka`: Spark's names."""

from __future__ import annotations

from functools import partial

from onceflow.connectors.spark.options import (
    BOOLEAN,
    COUNT,
    DURATION,
    NAMES,
    Option,
    OptionTable,
    choice,
)
from onceflow.sinks.kafka import KafkaSink

_READING = "it is an option of `readStream` and `read`"

KAFKA_WRITE = OptionTable(
    format="onceflow-kafka",
    direction="write",
    # As Spark's own format: the columns are the record.
    target=partial(KafkaSink, format="raw"),
    options=(
        Option("kafka.bootstrap.servers", "bootstrap_servers", "`host:port[,host:port]`"),
        Option("topic", "topic", "The topic; with topicColumn all that it may name", NAMES),
        Option("topicColumn", "topic_column", "The column that says which topic a row goes to"),
        Option("keyColumns", "key", "With json, the columns of the key", NAMES),
        Option(
            "valueFormat",
            "format",
            "`json`: the value is an object of all columns; `raw`: columns key, value and headers"
            " as Spark has them",
            choice("json", "raw"),
        ),
        Option("partitionColumn", "partition_column", "The column that says which partition"),
        Option("headersColumn", "headers", "The column of headers"),
        Option("createTopic", "create", "Whether to create topics that are missing", BOOLEAN),
        Option("partitions", "partitions", "Of a topic that is created", COUNT),
        Option("replicationFactor", "replication_factor", "Of a topic that is created", COUNT),
        Option(
            "transactionTimeout",
            "transaction_timeout_s",
            "How long producing one batch's rows of one partition may take",
            DURATION,
        ),
        Option("deadline", "deadline_s", "How long a broker may not answer", DURATION),
        Option(
            "staleRows",
            "stale_rows",
            "Decided rows that waited for longer than the broker keeps proofs: `fail`, `produce`",
            choice("fail", "produce"),
        ),
    ),
    prefix="kafka.",
    prefix_argument="options",
    refused={
        "includeHeaders": "headersColumn names the column of headers; with raw it is `headers`",
        **dict.fromkeys(
            ("subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets"),
            _READING,
        ),
        "delivery": "a format is always exactly once",
    },
)
