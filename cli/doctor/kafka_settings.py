"""What a broker's settings mean for a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from onceflow.cli.doctor.findings import Area, Finding

OFFSETS_RETENTION_MIN_MINUTES = 24 * 60
"""The Kafka sink's proof of a commit is a group's offset: it must outlive any downtime."""
_NEW_IN_4_3 = "cordoned.log.dirs"
"""A broker does not tell its version; since 4.3 it has this setting."""

Settings: TypeAlias = Mapping[str, str | None]


def settings_findings(area: Area, value: Settings, brokers: int) -> list[Finding]:
    """Return what is wrong with the settings of a broker of a cluster of `brokers`."""
    return [*_version(area, value), *_replication(area, value, brokers), *_limits(area, value)]


def topic_findings(area: Area, value: Settings, replicas: int, brokers: int) -> list[Finding]:
    """Return which failures make a topic with these settings forget what it acknowledged.

    A broker acknowledges before the disk has a record: its own process may die, and other brokers
    must have the record when its machine does.
    """
    outlives = "what is acknowledged outlives a broker's process"
    if replicas == 1 and brokers == 1 and value.get("flush.messages") != "1":
        return [area.ok(f"{outlives}, and not its machine: there is one broker")]
    more = "min.insync.replicas = 2 and three replicas, or it is gone with a broker's machine"
    alter = "kafka-configs.sh --alter --entity-type topics --entity-name <topic> --add-config"
    findings: list[Finding] = []
    if replicas == 1 and value.get("flush.messages") != "1":
        remedy = "kafka-reassign-partitions.sh with three replicas for each partition"
        findings.append(area.warning("1 replica", more, remedy))
    elif replicas > 1 and int(value.get("min.insync.replicas") or 1) < 2:
        remedy = f"{alter} min.insync.replicas=2"
        findings.append(area.warning("min.insync.replicas = 1", more, remedy))
    if value.get("unclean.leader.election.enable") == "true":
        findings.append(
            area.warning(
                "unclean.leader.election.enable = true",
                "false, or a replica that lacks acknowledged records may become the leader",
                f"{alter} unclean.leader.election.enable=false",
            )
        )
    return findings or [area.ok(f"{outlives} and its machine")]


def _version(area: Area, value: Settings) -> list[Finding]:
    """Source: KAFKA-20734."""
    if _NEW_IN_4_3 not in value:
        return []
    return [
        area.warning(
            "Kafka 4.3 or newer",
            "not 4.3.0, 4.3.1 or 4.4.0: killed in a commit, they may never end the transaction,"
            " and consumers that read committed wait for ever (KAFKA-20734)",
            "see kafka-topics.sh --version; use 4.2, or a release that has it mended",
        )
    ]


def _replication(area: Area, value: Settings, brokers: int) -> list[Finding]:
    findings: list[Finding] = []
    for name in (
        "transaction.state.log.replication.factor",
        "transaction.state.log.min.isr",
        "offsets.topic.replication.factor",
    ):
        number = int(value.get(name) or 1)
        if number > brokers:
            findings.append(
                area.problem(
                    f"{name} = {number} with {brokers} broker(s)",
                    "at most one for each broker, or no transaction and no group begins",
                    f"set {name}={brokers} in server.properties and restart the brokers",
                )
            )
    return findings


def _limits(area: Area, value: Settings) -> list[Finding]:
    timeout_ms = int(value.get("transaction.max.timeout.ms") or 900_000)
    retention = int(value.get("offsets.retention.minutes") or 10_080)
    findings: list[Finding] = []
    if timeout_ms < 60_000:
        findings.append(
            area.warning(
                f"transaction.max.timeout.ms = {timeout_ms}",
                "60000 or more: the Kafka sink writes a checkpoint's records in one",
                "set transaction.max.timeout.ms=900000 in server.properties",
            )
        )
    if retention < OFFSETS_RETENTION_MIN_MINUTES:
        findings.append(
            area.warning(
                f"offsets.retention.minutes = {retention}",
                f"{OFFSETS_RETENTION_MIN_MINUTES} or more, longer than a job is ever down: the"
                " Kafka sink's proof of a commit is an offset",
                "set offsets.retention.minutes=10080 in server.properties",
            )
        )
    return findings or [
        area.ok(f"transactions up to {timeout_ms // 1000} s, offsets kept for {retention} minutes")
    ]
