"""References to secrets: followed where somebody connects, and nowhere else."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.secret_references import follow_references, has_reference
from onceflow.sinks import MySQLSink, PostgresSink
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.settings import RULES


def test_variables_and_files_are_followed_wherever_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_USER", "ann")
    secret = tmp_path / "password"
    secret.write_text("p@ss${env:DB_USER}\n")
    text = "${env:DB_USER}:${file:%s}@host" % secret  # noqa: UP031 - braces of the reference
    assert has_reference(text)
    # What a secret holds is never itself followed.
    assert follow_references(text, setting="url") == "ann:p@ss${env:DB_USER}@host"
    assert follow_references("plain $HOME ${other:x}", setting="url") == "plain $HOME ${other:x}"


def test_a_missing_variable_is_named_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DB_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=r"password: .*DB_PASSWORD is not set.*executorEnv"):
        follow_references("${env:DB_PASSWORD}", setting="password")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_file_is_named_and_its_content_is_not(
    tmp_path: Path, content: bytes | None
) -> None:
    secret = tmp_path / "password"
    if content is not None:
        secret.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read here") as caught:
        follow_references("${file:%s}" % secret, setting="password")  # noqa: UP031
    assert str(secret) in str(caught.value)
    assert "xff" not in str(caught.value)


def test_a_kafka_source_pickles_and_prints_without_the_secret_that_it_refers_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    source = KafkaSource(
        "broker:9092",
        topic="payments",
        format="raw",
        options={"sasl.username": "ann", "kafka.sasl.password": "${env:KAFKA_PASSWORD}"},
    )
    assert b"hunter2" not in pickle.dumps(source)
    assert "hunter2" not in repr(source)
    options = source.settings.options
    assert RULES.resolve_secrets(options)["sasl.password"] == "hunter2"
    assert RULES.without_secrets("refused: hunter2", options) == "refused: ***"


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        (PostgresSink, "postgresql://ann@127.0.0.1:1/shop"),
        (PostgresSink, "postgresql://ann:${env:DB_PASSWORD}@127.0.0.1:1/shop"),
        (MySQLSink, "mysql://ann@127.0.0.1:1/shop"),
    ],
)
def test_a_database_sink_looks_its_password_up_where_it_connects(
    monkeypatch: pytest.MonkeyPatch, kind: type[PostgresSink] | type[MySQLSink], url: str
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    password = None if "env:" in url else "${env:DB_PASSWORD}"
    sink = kind(url, table="rows", password=password, connect_timeout_s=2)
    assert b"hunter2" not in pickle.dumps(sink)
    # Nobody listens on port 1: what matters is how far it gets.
    with pytest.raises(SinkError, match="cannot connect"):
        sink.settings.endpoint.connect("test")
    monkeypatch.delenv("DB_PASSWORD")
    with pytest.raises(ConfigError, match=r"password .*DB_PASSWORD is not set"):
        sink.settings.endpoint.connect("test")
