"""The assessment of the settings of brokers and topics, for the sink's start and the doctor.

It is here because source and sink do not import each other, and both use the same brokers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from onceflow.core.spi.connector import Area, Finding, Level

RETENTION = "offsets.retention.minutes"
RETENTION_MINUTES_MIN = 24 * 60
"""The minimum retention of group offsets in minutes.

A group's offset proves the sink's commit, so it must outlive any downtime. Kafka's default is a
week; before 2.0 it was a day.
"""
_NEW_IN_4_3 = "cordoned.log.dirs"
"""A setting that exists since 4.3. A broker does not report its version."""

KafkaConfig: TypeAlias = Mapping[str, str | None]
"""The settings of a broker or topic by name; empty if the user may not read them."""


def as_far_as_known(findings: Iterable[Finding]) -> list[Finding]:
    """Return `findings` for a caller that does not know whether a sink writes to the brokers."""
    return [
        replace(finding, level=Level.WARNING)
        if finding.level is Level.PROBLEM and finding.found.startswith(RETENTION)
        else finding
        for finding in findings
    ]


def record_size_finding(area: Area, value: KafkaConfig, limit: int, option: str) -> Finding:
    """Return a finding: ok if the topic accepts records of `limit` bytes, otherwise a problem.

    `option` is the option of the sink that sets `limit`. If the topic accepts less, the broker
    refuses a large row only after its checkpoint was decided, and the job cannot continue.
    """
    # A setting that the user may not read is assumed to be good: the missing right must not prevent
    # a job's start.
    accepted = int(value.get("max.message.bytes") or limit)
    if accepted >= limit:
        return area.ok(f"it accepts records of up to {limit} bytes")
    return area.problem(
        f"it accepts records of up to {accepted} bytes (max.message.bytes), but the sink"
        f" allows {limit}",
        "the same limit in both",
        f"give options={{{option!r}: {accepted}}}, or raise it: kafka-configs.sh --alter"
        f" --entity-type topics --entity-name <topic> --add-config max.message.bytes={limit}",
    )


def is_compacted(value: KafkaConfig) -> bool:
    """Return True if the broker compacts a topic with these settings."""
    return "compact" in _cleanup_policy(value)


def _cleanup_policy(value: KafkaConfig) -> str:
    return value.get("cleanup.policy") or "delete"


def compaction_finding(area: Area, value: KafkaConfig, keys: str | None) -> Finding:
    """Return a finding: a problem if the topic is compacted and records may have no key.

    The broker would refuse a record without a key only after its checkpoint was decided.

    Args:
        area: The topic.
        value: Its settings.
        keys: The column of the key that may be null; empty if every record has a key, None if no
            record has one.
    """
    policy = _cleanup_policy(value)
    if not is_compacted(value) or keys == "":
        return area.ok(f"it accepts the sink's records with their keys (cleanup.policy={policy})")
    needed = "a key in every record: the broker rejects records without one"
    if keys is None:
        return area.problem(
            f"cleanup.policy={policy}, and the sink's records have no key",
            needed,
            "give key=, or with format='raw' a column key; or write to a topic that is not"
            " compacted",
        )
    return area.warning(
        f"cleanup.policy={policy}, and column {keys!r} of the key may be null",
        needed,
        "filter rows without a key before the sink: they are bad rows",
    )


def broker_findings(area: Area, value: KafkaConfig) -> list[Finding]:
    """Return the settings of a broker that do not suit the sink's transactions and proofs."""
    return [*_version(area, value), *_limits(area, value)]


def topic_findings(area: Area, value: KafkaConfig, replicas: int, brokers: int) -> list[Finding]:
    """Return the settings of a topic by which acknowledged records may be lost.

    A broker acknowledges a record before the record is on disk. The record survives a crash of the
    broker's process. If the broker's machine fails, only other brokers still have the record.
    """
    outlives = "acknowledged records survive a crash of the broker's process"
    in_sync = int(value.get("min.insync.replicas") or 1)
    # A single broker has no other broker to hold the record, so no setting can help.
    if replicas == brokers == in_sync == 1 and value.get("flush.messages") != "1":
        return [area.ok(f"{outlives}, but not the loss of its machine: there is one broker")]
    more = (
        "min.insync.replicas = 2 and three replicas; otherwise they are lost with a broker's"
        " machine"
    )
    alter = "kafka-configs.sh --alter --entity-type topics --entity-name <topic> --add-config"
    findings: list[Finding] = []
    # Check this first, because then no record is accepted at all. The other findings lose records
    # only if a machine fails.
    if replicas < in_sync:
        text = f"it has {replicas} replicas, but requires {in_sync} in sync (min.insync.replicas)"
        needed = "at least as many replicas as it requires; otherwise it accepts no record"
        remedy = f"{alter} min.insync.replicas={replicas}, or give each partition more replicas"
        findings.append(area.problem(text, needed, remedy))
    elif replicas == 1 and value.get("flush.messages") != "1":
        remedy = "kafka-reassign-partitions.sh with three replicas for each partition"
        findings.append(area.warning("1 replica", more, remedy))
    elif replicas > 1 and in_sync < 2:
        remedy = f"{alter} min.insync.replicas=2"
        findings.append(area.warning("min.insync.replicas = 1", more, remedy))
    if value.get("unclean.leader.election.enable") == "true":
        findings.append(
            area.warning(
                "unclean.leader.election.enable = true",
                "false; otherwise a replica that lacks acknowledged records may become the leader",
                f"{alter} unclean.leader.election.enable=false",
            )
        )
    return findings or [area.ok(f"{outlives} and the loss of its machine")]


def _version(area: Area, value: KafkaConfig) -> list[Finding]:
    """Return a warning for a broker of version 4.3 or newer.

    Source: KAFKA-20734.
    """
    if _NEW_IN_4_3 not in value:
        return []
    return [
        area.warning(
            "Kafka 4.3 or newer",
            "a version other than 4.3.0, 4.3.1 and 4.4.0: a broker of these that is killed"
            " during a commit may never end the transaction, and consumers that read committed"
            " wait for ever (KAFKA-20734)",
            "see kafka-topics.sh --version; use 4.2, or a release with the fix",
        )
    ]


def replication_findings(area: Area, value: KafkaConfig, brokers: int) -> list[Finding]:
    """Return a problem for each internal topic that needs more replicas than there are `brokers`.

    These problems do not prevent a start: the topics may exist already, or brokers may be down now
    and start later.
    """
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
                    "at most the number of brokers; otherwise no transaction and no group"
                    " can begin",
                    f"set {name}={brokers} in server.properties and restart the brokers",
                )
            )
    return findings


def _limits(area: Area, value: KafkaConfig) -> list[Finding]:
    timeout_ms = int(value.get("transaction.max.timeout.ms") or 900_000)
    retention = int(value.get(RETENTION) or 10_080)
    findings: list[Finding] = []
    if timeout_ms < 60_000:
        findings.append(
            area.warning(
                f"transaction.max.timeout.ms = {timeout_ms}",
                "60000 or more: the Kafka sink writes a checkpoint's records in one",
                "set transaction.max.timeout.ms=900000 in server.properties",
            )
        )
    if retention < RETENTION_MINUTES_MIN:
        findings.append(
            area.problem(
                f"{RETENTION} = {retention}: the broker deletes offsets, which prove the Kafka"
                f" sink's commits, after {retention} minutes",
                f"{RETENTION_MINUTES_MIN} or more, and longer than any downtime of a job",
                f"set {RETENTION}=10080 in server.properties",
            )
        )
    return findings or [
        area.ok(f"transactions up to {timeout_ms // 1000} s, offsets kept for {retention} minutes")
    ]
