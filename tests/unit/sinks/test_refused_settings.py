"""A refusal that a server or a machine may take back is SettingsRefused; a restart outlives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from onceflow.clients.kafka.client import make_access_error, make_login_error
from onceflow.core.errors import OnceflowError, SettingsRefused
from onceflow.core.protocol.failures import is_final
from onceflow.core.secret_references import follow_references
from onceflow.sinks import MySQLSink, PostgresSink
from onceflow.sources import KafkaSource

KAFKA = KafkaSource(bootstrap_servers="broker.invalid:9092", topic="payments", format="raw")


def connect_to_postgres() -> None:
    sink = PostgresSink(url="postgresql://app@db.invalid/shop", table="payments")
    sink.settings.endpoint.connect("a test")


def connect_to_mysql() -> None:
    sink = MySQLSink(url="mysql://app:secret@db.invalid/shop", table="payments")
    sink.settings.endpoint.connect("a test")


def authenticate_at_kafka() -> None:
    raise make_login_error(KAFKA.settings, "SASL authentication error")


def read_from_kafka_without_right() -> None:
    raise make_access_error(KAFKA.settings, "payments")


def read_a_secret_that_is_being_replaced() -> None:
    follow_references("${file:/nowhere/password}", setting="the sink's password")


def read_a_tls_file_that_is_being_replaced() -> None:
    from onceflow import TlsFiles
    from onceflow.core.runtime.transport.credentials import identity_in

    missing = str(Path("/nowhere/tls.pem"))
    identity_in(TlsFiles(certificate=missing, key=missing, authority=missing))


@pytest.mark.parametrize(
    "refused",
    [
        connect_to_postgres,
        connect_to_mysql,
        authenticate_at_kafka,
        read_from_kafka_without_right,
        read_a_secret_that_is_being_replaced,
        read_a_tls_file_that_is_being_replaced,
    ],
    ids=lambda refused: refused.__name__,
)
def test_a_refusal_that_may_pass_ends_a_first_start_and_no_job_that_has_run(
    refused: Callable[[], None],
) -> None:
    with pytest.raises(OnceflowError) as raised:
        refused()
    assert type(raised.value) is SettingsRefused, raised.value
    assert is_final(raised.value, has_run=False)
    assert not is_final(raised.value, has_run=True)
    assert "secret" not in str(raised.value).replace("the secret's file", "")
