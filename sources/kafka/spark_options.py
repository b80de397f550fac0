"""A Kafka source from the options that users of Spark's own Kafka source know.

    {"kafka.bootstrap.servers": "…", "subscribe": "payments", "startingOffsets": "earliest"}

Option names are matched without regard to case, as Spark does; `kafka.` options go to the client.
An option that would change what is read, and that is not supported, is refused and never ignored.

Source: Spark 4, "Structured Streaming + Kafka Integration Guide".
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from onceflow.core.errors import ConfigError
from onceflow.sources.kafka.offsets import OffsetsLike
from onceflow.sources.kafka.options import SPARK_PREFIX
from onceflow.sources.kafka.settings import ValueFormat
from onceflow.sources.kafka.source import KafkaSource
from onceflow.sources.schema_text import SchemaLike

_BOOTSTRAP = "kafka.bootstrap.servers"
_GROUP = "kafka.group.id"
_IGNORED = frozenset({"minpartitions", "maxrecordsperpartition", "kafkaconsumer.polltimeoutms"})
"""How Spark cuts its own batches; it changes nothing of what is read."""
_REFUSED: Mapping[str, str] = {
    "assign": "name the topics: subscribe=a,b; all partitions of a topic are read",
    "includeheaders": "headers are not read yet; leave it away",
    "maxoffsetspertrigger": "batches are bounded by batch_rows and by backpressure; leave it away",
    "startingoffsetsbytimestamp": "give startingTimestamp, one time for all partitions",
    "endingoffsetsbytimestamp": "give endingTimestamp, one time for all partitions",
}


def source_of_spark_options(
    options: Mapping[str, str], *, schema: SchemaLike | None = None
) -> KafkaSource:
    """Return the source that `options` describe: raw without `schema`, JSON values with it.

    Raises:
        ConfigError: A needed option is missing, or one is not supported; names it.
    """
    given = {name.lower(): value for name, value in options.items()}
    client = {
        name[len(SPARK_PREFIX) :]: value
        for name, value in options.items()
        if name.lower().startswith(SPARK_PREFIX) and name.lower() not in (_BOOTSTRAP, _GROUP)
    }
    left = {name for name in given if not name.startswith(SPARK_PREFIX)} - _IGNORED

    def take(name: str) -> str | None:
        left.discard(name.lower())
        return given.get(name.lower())

    servers, topics, pattern = given.get(_BOOTSTRAP), take("subscribe"), take("subscribePattern")
    ending = _offsets(take("endingOffsets"), take("endingTimestamp"), "ending")
    starting = _offsets(take("startingOffsets"), take("startingTimestamp"), "starting")
    fail_on_data_loss = _flag(take("failOnDataLoss"), "failOnDataLoss", default=True)
    prefix = take("groupIdPrefix")
    for name in sorted(left):
        advice = _REFUSED.get(name, "it is no option of a Kafka source")
        raise ConfigError(f"Kafka option {name!r}: {advice}")
    if servers is None or (topics is None) == (pattern is None):
        raise ConfigError(
            f"a Kafka source needs the options {_BOOTSTRAP} and subscribe or subscribePattern, one"
            " of the two"
        )
    return KafkaSource(
        servers,
        topic=None if topics is None else [topic.strip() for topic in topics.split(",")],
        topic_pattern=pattern,
        format=ValueFormat.RAW if schema is None else ValueFormat.JSON,
        schema=schema,
        starting_offsets="earliest" if starting is None else starting,
        ending_offsets=ending,
        group_id=given.get(_GROUP) or prefix,
        fail_on_data_loss=fail_on_data_loss,
        options=client,
    )


def _offsets(offsets: str | None, timestamp: str | None, side: str) -> OffsetsLike | None:
    """Return the offsets given; a timestamp wins over them, as it does in Spark."""
    if timestamp is None:
        return offsets
    if not timestamp.strip().isdecimal():
        raise ConfigError(f"{side}Timestamp={timestamp!r} is no number of milliseconds since 1970")
    return dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(
        milliseconds=int(timestamp)
    )


def _flag(text: str | None, name: str, *, default: bool) -> bool:
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise ConfigError(f"Kafka option {name}={text!r} is neither true nor false")
    return text.strip().lower() == "true"
