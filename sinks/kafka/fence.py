"""The fence of a sink id and the commit offsets of its lanes, which Kafka keeps as offsets.

The group `onceflow/<sink id>/owner` has the fence.

Kafka has no table for the claim. The offset's metadata contain the decision log and the attempt.
They are changed in transactions of one transactional id, so that of two concurrent claims one is
fenced. The claim is renewed while the job runs, because a broker forgets offsets that are no longer
committed. It also names the newest commit, because that commit's own offset is forgotten if no rows
arrive for a long time.

A removed subtask, or a topic that is no longer written to, leaves its commit offset behind. So
brokers are asked for all lanes, and for the offsets of all topics.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, Producer, TopicPartition

from onceflow.clients.kafka.brokers import Admin, await_result
from onceflow.clients.kafka.client import describe_error, error_of
from onceflow.core.errors import Fenced, SettingsRefused, SinkError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.core.spi import CommitterContext
from onceflow.sinks.base.checks import FenceOwner, check_fence, check_owner
from onceflow.sinks.kafka import clients
from onceflow.sinks.kafka.clients import advise_on_rights, open_brokers
from onceflow.sinks.kafka.settings import KafkaSinkSettings
from onceflow.sinks.kafka.transactional_lane import lane_name, list_proven


def last_commits(settings: KafkaSinkSettings, sink_id: str, log_id: str) -> Sequence[TransactionId]:
    """Return the last transaction of each lane and topic, of the job with that decision log.

    Raises:
        ConfigError: The query is not permitted.
        SinkError: No broker replied in time.
    """
    brokers = open_brokers(settings)
    groups = brokers.ask(
        partial(_list_groups, brokers.admin), f"consumer groups of {settings.where}"
    )
    # The name of lane 0 without its number, then any number.
    lane = re.compile(re.escape(lane_name(sink_id, 0)[:-1]) + r"\d+")
    texts = [read_texts(settings, group).values() for group in groups if lane.fullmatch(group)]
    return list_proven(chain.from_iterable(texts), log_id)


def read_texts(settings: KafkaSinkSettings, group: str) -> Mapping[str, str]:
    """Return by topic the metadata that `group` has committed with partition 0.

    Empty if no such group.

    Raises:
        ConfigError: The query is not permitted.
        SinkError: No broker replied in time.
    """
    brokers = open_brokers(settings)
    what = f"offsets of group {group} at {settings.where}"
    return brokers.ask(partial(_ask_texts, brokers.admin, group), what)


def _list_groups(admin: Admin, timeout_s: float) -> Sequence[str]:
    listing = await_result(admin.list_consumer_groups(request_timeout=timeout_s), timeout_s)
    for error in listing.errors:  # a broker that did not list its own groups
        raise error
    return [group.group_id for group in listing.valid]


def _ask_texts(admin: Admin, group: str, timeout_s: float) -> Mapping[str, str]:
    # First ask for the group. librdkafka 2.16 ends the process by SIGSEGV if a broker answers the
    # question for offsets by "not coordinator", for example right after it has started (librdkafka
    # issue 5040). This question fails instead, and is repeated until a coordinator answers.
    await_result(
        admin.describe_consumer_groups([group], request_timeout=timeout_s)[group], timeout_s
    )
    asked = [ConsumerGroupTopicPartitions(group)]
    futures = admin.list_consumer_group_offsets(asked, request_timeout=timeout_s)
    partitions = await_result(futures[group], timeout_s).topic_partitions
    for partition in partitions:
        if partition.error is not None:
            raise KafkaException(partition.error)
    return {
        partition.topic: partition.metadata
        for partition in partitions
        if partition.metadata and not partition.partition
    }


RENEWED_EVERY_S = 6 * 3600.0
"""The interval of renewals: a quarter of the shortest retention that `open` accepts."""


def owner_group(sink_id: str) -> str:
    """Return the group whose offsets name the owner of `sink_id`."""
    return f"onceflow/{sink_id}/owner"


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of the owner's offset."""

    owner: FenceOwner
    committed: Decided | None = None
    """The newest commit under the sink id at the time of writing."""


class Fence:
    """The claim of one job, in one attempt, to one sink id."""

    def __init__(self, settings: KafkaSinkSettings, context: CommitterContext) -> None:
        self._settings = settings
        self._context = context
        self._name = owner_group(context.sink_id)
        self._renew_at_s = time.monotonic() + RENEWED_EVERY_S

    def claim(self) -> None:
        """Make this attempt the only one that may write under the sink id.

        Runs a whole transaction with an offset. So it also proves that the sink's transactional
        ids, groups and topics are permitted.

        Raises:
            ConfigError: Another job owns the sink id, or a request is not permitted.
            Fenced: The same attempt or a newer one has claimed it.
            SinkError: Kafka cannot be asked now.
        """

        def admit(owner: FenceOwner | None) -> bool:
            check_fence(self._context.sink_id, owner, self._owner, take_over=self._take_over)
            return True

        self._write_if(admit)

    def read_record(self) -> TargetRecord | None:
        """Return the claim and the commits of the sink id, or None if Kafka has neither.

        Fences no process and waits for no transaction: a transaction that is ending now may be
        missing.

        Raises:
            ConfigError: Another job owns the sink id, or a request is not permitted.
            SinkError: Kafka cannot be asked now.
        """
        texts = read_texts(self._settings, self._name)
        claim = newest_claim(texts[topic] for topic in self._settings.topics if topic in texts)
        if claim is not None:
            check_owner(self._context.sink_id, claim.owner, self._owner, take_over=self._take_over)
        return record_of(
            claim, newest_commits(self._settings, claim, self._context), self._context.sink_id
        )

    def refresh(self) -> None:
        """Renew the claim when it is due; do not touch a newer attempt's or another job's claim.

        Raises:
            SinkError: Kafka cannot be asked now.
        """
        if time.monotonic() >= self._renew_at_s:
            # Set before the try, so that not every `prune` asks a broker that is down.
            self._renew_at_s = time.monotonic() + RENEWED_EVERY_S
            self._write_if(lambda owner: owner is None or owner == self._owner)

    @property
    def _take_over(self) -> str:
        return (
            f"kafka-consumer-groups.sh --bootstrap-server {self._settings.bootstrap_servers}"
            f" --delete --group '{self._name}'"
        )

    @property
    def _owner(self) -> FenceOwner:
        return FenceOwner(self._context.log_id, self._context.attempt, self._context.job)

    def _write_if(self, may_write: Callable[[FenceOwner | None], bool]) -> None:
        deadline = time.monotonic() + self._settings.deadline_s
        producer = clients.open_producer(
            self._settings, client_id="onceflow-owner", transactional_id=self._name
        )
        reader = clients.open_group_reader(self._settings, self._name, clients.Isolation.DECIDED)
        try:
            # A process that claims at the same time is fenced by this call, or fences this one.
            clients.call_repeatedly(producer.init_transactions, deadline=deadline)
            # Read after the fence: another producer's unfinished claim is ended by now, and read
            # here.
            texts = clients.read_committed_metadata(
                reader, self._settings.topics, deadline=deadline
            )
            before = newest_claim(texts.values())
            if may_write(before.owner if before else None):
                newest = max(
                    newest_commits(self._settings, before, self._context), key=_order, default=None
                )
                group = cast("Any", reader).consumer_group_metadata()
                self._write(producer, group, newest, deadline)
        except KafkaException as error:
            text = f"sink id {self._context.sink_id!r} cannot be claimed at {self._settings.where}"
            raise refusal(error, self._settings, text) from error
        except TimeoutError as error:
            raise SinkError(f"sink id {self._context.sink_id!r} is not claimed: {error}") from error
        finally:
            reader.close()

    def _write(
        self,
        producer: Producer,
        group: Any,
        newest: TransactionId | Decided | None,
        deadline: float,
    ) -> None:
        owner = self._owner
        facts = {"log": owner.log_id, "attempt": owner.attempt, "job": owner.job}
        if newest is not None:
            facts |= {"committed": list(_order(newest))}
        text = json.dumps(facts)
        offsets = [
            TopicPartition(topic, 0, self._owner.attempt, text) for topic in self._settings.topics
        ]

        def send(timeout_s: float) -> None:
            producer.send_offsets_to_transaction(offsets, group, timeout_s)

        producer.begin_transaction()
        clients.call_repeatedly(send, deadline=deadline)
        clients.call_repeatedly(producer.commit_transaction, deadline=deadline)


def refusal(
    error: KafkaException, settings: KafkaSinkSettings, text: str
) -> SettingsRefused | Fenced | SinkError:
    """Return the error for the user: `text`, the reason of `error`, and the right to grant."""
    reason = describe_error(error, settings)
    if clients.is_fenced(error_of(error)):
        return Fenced(f"{text}: another attempt claims it at this moment: {reason}")
    advice = advise_on_rights(error_of(error))
    return (
        SettingsRefused(f"{text}: {reason}; {advice}") if advice else SinkError(f"{text}: {reason}")
    )


def newest_commits(
    settings: KafkaSinkSettings, claim: Claim | None, context: CommitterContext
) -> Sequence[TransactionId | Decided]:
    """Return the last commit of each lane, and the newest commit that `claim` names.

    Raises:
        ConfigError: The query is not permitted.
        SinkError: Kafka cannot be asked now.
    """
    commits = last_commits(settings, context.sink_id, context.log_id)
    return commits if claim is None or claim.committed is None else (*commits, claim.committed)


def record_of(
    claim: Claim | None, commits: Sequence[TransactionId | Decided], sink_id: str
) -> TargetRecord | None:
    """Return the record of a sink id from its claim and commits, or None if there are neither."""
    if claim is None and not commits:
        return None
    attempt = claim.owner.attempt if claim else 0
    return to_record(sink_id, attempt, commits, proves_each=False)


def newest_claim(texts: Iterable[str]) -> Claim | None:
    """Return the newest claim in the metadata of the owner group's offsets, or None."""
    return max(map(_parse, texts), key=lambda claim: claim.owner.attempt, default=None)


def _parse(text: str) -> Claim:
    fields = json.loads(text)
    owner = FenceOwner(str(fields["log"]), int(fields["attempt"]), str(fields["job"]))
    # The first claim of a sink id names no commit.
    committed = fields.get("committed")
    return Claim(owner, Decided(*map(int, committed)) if committed else None)


def _order(commit: TransactionId | Decided) -> tuple[int, int]:
    return commit.attempt, commit.checkpoint
