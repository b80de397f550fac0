from __future__ import annotations

import datetime as dt
import logging
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError

from onceflow.clients.kafka.client import make_login_error
from onceflow.core.arrow.schema_text import schema_of
from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.spi import Split
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.client import LoggedTroubles, group_id_of
from onceflow.sources.kafka.position import PartitionPosition, describe_gap, gap_error
from onceflow.sources.kafka.settings import RULES, AtOffsets, AtTime, Earliest, Latest, offsets_of

SECRETS = {
    "kafka.sasl.password": "hunter2",
    "ssl.key.password": "hunter3",
    "ssl.keystore.password": "hunter4",
    "ssl.key.pem": "-----BEGIN hunter5",
    "sasl.oauthbearer.client.secret": "hunter6",
    "sasl.oauthbearer.config": "hunter7",
}


def _source(**settings: Any) -> KafkaSource:
    given: dict[str, Any] = {"topic": "payments", "schema": "id BIGINT", **settings}
    return KafkaSource("nowhere:9092", **given)


def test_no_secret_is_printed_and_all_survive_the_way_to_the_executors() -> None:
    source = _source(options={**SECRETS, "sasl.username": "ann"})
    assert "hunter" not in repr(source) + str(source) + f"{source!s}"
    assert "'sasl.username': 'ann'" in repr(source)
    assert repr(pickle.loads(pickle.dumps(source))) == repr(source)
    assert pickle.dumps(source).count(b"hunter") == len(SECRETS)
    assert set(RULES.printable(RULES.accept(SECRETS)).values()) == {"***"}


def test_secret_in_a_message_of_the_client_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    settings = _source(options={"sasl.password": "hunter2", "sasl.username": "ann"}).settings
    troubles = LoggedTroubles(settings)
    error = KafkaError(KafkaError._AUTHENTICATION, "SASL: ann:hunter2 was refused")
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            troubles.note(error)
    refused = str(make_login_error(settings, troubles.authentication))
    assert "hunter2" not in caplog.text + troubles.last + refused
    assert len(caplog.records) == 1
    assert "user 'ann'" in refused
    troubles.clear()
    assert (troubles.last, troubles.authentication) == ("", "")
    assert RULES.without_secrets("x", {"sasl.password": ""}) == "x"


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("kafka.sasl.jaas.config", "x", "sasl.username and sasl.password"),
        ("ssl.truststore.location", "/t.p12", "ssl.ca.location"),
        ("ssl.keystore.location", "/k.jks", "keytool -importkeystore"),
        ("kafka.group.id", "g", "group_id="),
        ("enable.auto.commit", True, "checkpoints"),
        ("auto.offset.reset", "latest", "starting_offsets="),
        ("bootstrap.servers", "b:1", "bootstrap_servers="),
    ],
)
def test_option_of_java_or_of_the_engine_is_refused_with_what_to_give_instead(
    option: str, value: Any, advice: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _source(options={option: value})
    assert repr(option) in str(caught.value)
    assert advice in str(caught.value)


def test_options_are_taken_under_both_names_and_never_with_two_values() -> None:
    assert RULES.accept({"kafka.fetch.min.bytes": 7, "check.crcs": False}) == {
        "fetch.min.bytes": "7",
        "check.crcs": "false",
    }
    with pytest.raises(ConfigError, match="twice"):
        RULES.accept({"kafka.fetch.min.bytes": 7, "fetch.min.bytes": 8})


def test_option_unknown_to_librdkafka_is_named_by_the_check() -> None:
    with pytest.raises(ConfigError, match=r'No such configuration property: "fetch\.bytes"'):
        _source(options={"fetch.bytes": "1"}).validate()


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"format": "orc"}, "choose one of json, raw, avro"),
        ({"format": "csv", "schema": None}, "needs schema="),
        ({"schema": None}, "needs schema="),
        ({"format": "raw"}, "omit schema="),
        ({"format": "raw", "schema": None, "include_metadata": True}, "include_metadata"),
        ({"topic": []}, "at least one topic"),
        ({"topic": ["a", "a"]}, "twice"),
        ({"on_bad_record": "ignore"}, "choose one of fail, drop, dead_letter"),
        ({"starting_offsets": "beginning"}, "earliest, latest"),
        ({"starting_offsets": "{"}, "is not JSON"),
        ({"starting_offsets": {"payments": 3}}, "offsets look like"),
        ({"starting_offsets": {"payments": {0: -3}}}, "cannot be"),
        ({"starting_offsets": dt.datetime(2024, 1, 1)}, "time zone"),
        (
            {"starting_offsets": dt.datetime(1969, 12, 31, tzinfo=dt.timezone.utc)},
            "starting_offsets=1969-12-31T00:00:00.00:00 is before 1970.* write 'earliest'",
        ),
        (
            {"ending_offsets": dt.datetime(1969, 12, 31, tzinfo=dt.timezone.utc)},
            "ending_offsets=1969-12-31",
        ),
        ({"starting_offsets": '{"t": {"0": 1.5}}'}, "offsets look like"),
        ({"starting_offsets": '{"t": {"0": true}}'}, "offsets look like"),
        ({"starting_offsets": {"t": {0: None}}}, "offsets look like"),
        ({"starting_offsets": {"t": {0: 23, "0": 42}}}, "names partition 0 of topic 't' twice"),
        ({"starting_offsets": '{"t": {"0": 23, "0": 42}}'}, "names '0' twice"),
        ({"starting_offsets": '{"t": {"0": 23}, "t": {"1": 42}}'}, "names 't' twice"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"batch_bytes": 0}, "batch_bytes"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"schema": pa.schema([("at", pa.time32("s"))])}, "column 'at'"),
    ],
)
def test_wrong_setting_is_refused_when_the_source_is_built(
    settings: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ConfigError, match=fragment):
        _source(**settings)


def test_offsets_are_understood_in_every_spelling() -> None:
    utc = dt.timezone.utc
    assert offsets_of(" Earliest", setting="s") == Earliest()
    assert offsets_of("latest", setting="s") == Latest()
    assert offsets_of(dt.datetime(1970, 1, 1, 0, 0, 2, tzinfo=utc), setting="s") == AtTime(2000)
    # The record of millisecond 2000 is older than this time.
    since = dt.datetime(1970, 1, 1, 0, 0, 2, 1, tzinfo=utc)
    assert offsets_of(since, setting="s") == AtTime(2001)
    explicit = AtOffsets({"t": {0: 23, 1: -2}})
    assert offsets_of('{"t": {"0": 23, "1": -2}}', setting="s") == explicit
    assert offsets_of({"t": {0: 23, 1: -2}}, setting="s") == explicit
    # As a DataFrame has them.
    counted: Any = {"t": {np.int64(0): np.int32(23), np.int64(1): np.int64(-2)}}
    assert offsets_of(counted, setting="s") == explicit


def test_bounded_is_what_has_an_end() -> None:
    assert not _source().bounded
    assert _source(ending_offsets="latest").bounded


def test_group_is_named_after_the_job_unless_the_user_names_it() -> None:
    assert group_id_of(_source().settings, job="ledger", uid="in") == "onceflow-ledger-in"
    assert group_id_of(_source(group_id="mine").settings, job="ledger", uid="in") == "mine"


def test_position_survives_its_split() -> None:
    for position in (
        PartitionPosition("a-b", 7, 42),
        PartitionPosition("zażółć", 0, 5, 9, topic_id="uKAYaXP6S", cluster_id="phfLa288R"),
        PartitionPosition("payments", 1, 5, leader_epoch=3),
    ):
        assert PartitionPosition.from_split(position.to_split()) == position
    assert PartitionPosition("payments", 0, 1).to_split().id == "payments-0"


def test_position_of_a_checkpoint_that_is_older_than_ids_is_read() -> None:
    old = Split("payments-3", b'{"topic":"payments","partition":3,"next":42,"stop":null}')
    assert PartitionPosition.from_split(old) == PartitionPosition("payments", 3, 42)


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"topic": None}, "at least one topic, or topic_pattern="),
        ({"topic_pattern": "a.*"}, "one of the two"),
        ({"topic": None, "topic_pattern": "a("}, r"'a\(' is not a regular expression"),
        ({"partition_discovery_interval": 0}, "not positive"),
        ({"partition_discovery_interval": "soon"}, "partition_discovery_interval='soon'"),
    ],
)
def test_what_is_to_be_discovered_is_checked_at_once(given: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        _source(**given)


def test_pattern_matches_the_whole_name() -> None:
    settings = _source(topic=None, topic_pattern="pay.*s").settings
    assert [settings.reads(name) for name in ("payments", "pays", "payment", "repays")] == [
        *(True, True, False, False)
    ]


def test_new_partitions_are_looked_for_every_minute_unless_told_otherwise() -> None:
    assert _source().discovery_interval_s == 60
    assert _source(partition_discovery_interval="500 ms").discovery_interval_s == 0.5
    assert _source(partition_discovery_interval=None).discovery_interval_s is None


@pytest.mark.parametrize(
    "position", [b"", b"7", b"{}", b'{"split":0,"next":1,"stop":null}', b"\xff"]
)
def test_split_of_another_source_is_refused(position: bytes) -> None:
    with pytest.raises(StateIncompatible, match="another source"):
        PartitionPosition.from_split(Split("x", position))


def test_gap_names_both_offsets_and_what_is_missing() -> None:
    for text in (
        str(gap_error("payments", 3, offset_next=10, low=25, high=40)),
        describe_gap("payments", 3, offset_next=10, low=25, high=40),
    ):
        assert "payments-3: offset 10 was to be read next" in text
        assert "earliest one left is 25: 15 offsets (10 to 24)" in text
    assert "the topic ends at 40" in describe_gap("payments", 3, offset_next=50, low=0, high=40)


@pytest.mark.parametrize("offset_next", [10, 50])
def test_only_an_error_of_a_gap_gives_advice(offset_next: int) -> None:
    """The warning is logged where fail_on_data_loss=False is set already."""
    gap = {"offset_next": offset_next, "low": 25, "high": 40}
    assert "fail_on_data_loss=False" in str(gap_error("payments", 3, **gap))
    assert "fail_on_data_loss" not in describe_gap("payments", 3, **gap)


def test_spark_ddl_and_mappings_describe_arrow_schemas() -> None:
    text = """id BIGINT NOT NULL, `odd ``name` string, price decimal(12, 2), d DECIMAL(5),
        at TIMESTAMP, local timestamp_ntz, tags ARRAY<STRING>,
        inner STRUCT<x: INT NOT NULL, y: ARRAY<DOUBLE>>, raw BINARY, `not` boolean"""
    assert schema_of(text).equals(
        pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                pa.field("odd `name", pa.string()),
                pa.field("price", pa.decimal128(12, 2)),
                pa.field("d", pa.decimal128(5, 0)),
                pa.field("at", pa.timestamp("us", "UTC")),
                pa.field("local", pa.timestamp("us")),
                pa.field("tags", pa.list_(pa.string())),
                pa.field(
                    "inner",
                    pa.struct(
                        [
                            pa.field("x", pa.int32(), nullable=False),
                            pa.field("y", pa.list_(pa.float64())),
                        ]
                    ),
                ),
                pa.field("raw", pa.binary()),
                pa.field("not", pa.bool_()),
            ]
        )
    )
    assert schema_of({"id": "bigint", "at": pa.timestamp("ms", "UTC")}).equals(
        pa.schema([("id", pa.int64()), ("at", pa.timestamp("ms", "UTC"))])
    )


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "column name is missing"),
        ("id", "a type is missing, at 'its end'"),
        ("id bigint,", "column name is missing"),
        ("id varchar", "'varchar' is not one of"),
        ("id decimal(39, 0)", "1 to 38 digits"),
        ("id decimal(4, 5)", "1 to 38 digits"),
        ("id decimal(x)", "a number is missing"),
        ("id int not", "NOT without NULL"),
        ("id array<int", "'>' is missing"),
        ("id int name string", "not expected here, at 'name string'"),
        ("id int; x int", "at '; x int'"),
        ("id int, id int", r"\['id'\] more than once"),
    ],
)
def test_schema_text_that_makes_no_sense_says_where(text: str, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        schema_of(text)
