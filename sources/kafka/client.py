"""How a Kafka client is opened, what it reported, and whether the brokers still answer.

A client that has lost its brokers looks like one whose topic is idle: it says nothing. So a thread
(`LivenessWatch`) asks every few seconds for the topic's leaders, and each leader for one
partition's end. It asks with a client of its own, because confluent-kafka lets one thread at a time
into a client, and a thread that polls in a loop never lets another one in (seen with 2.16: `commit`
and `list_topics` wait for ever). And were it let in, a broker answers the questions of one
connection in turn, so the reader would wait for the answer together with its fetch, for up to
fetch.wait.max.ms.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from onceflow.core.errors import ConfigError, OnceflowError, SourceUnavailable
from onceflow.sources.kafka.settings import RULES, TUNED_DEFAULTS, KafkaSettings

logger = logging.getLogger("onceflow.sources.kafka")

CLOSE_S = 5.0

_AUTHENTICATION_CODES = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)
_DENIED_CODES = frozenset(
    {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}
)


class ClientTroubles:
    """Remembers the last thing that went wrong in a client; given to it as its error callback.

    Called on whatever thread polls the client. Says a new trouble once in the log, not with every
    attempt to connect again.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._last = ""
        self._noted: set[int] = set()
        self._authentication = ""

    @property
    def last(self) -> str:
        """What was reported last, without secrets; empty when nothing was."""
        return self._last

    @property
    def authentication(self) -> str:
        """What the broker said when it refused who we are; empty when it did not."""
        return self._authentication

    def note(self, error: KafkaError) -> None:
        """Remember `error`."""
        text = RULES.without_secrets(error.str(), self._settings.options)
        code = error.code()
        with self._lock:
            is_new = code not in self._noted
            self._noted.add(code)
            self._last = text
            if code in _AUTHENTICATION_CODES:
                self._authentication = text
        if is_new:
            logger.warning("Kafka client of %s: %s", self._settings.what, text)

    def clear(self) -> None:
        """Forget everything: the client works again."""
        with self._lock:
            self._noted.clear()
            self._last = self._authentication = ""


def open_consumer(
    settings: KafkaSettings, troubles: ClientTroubles, *, group_id: str, client_id: str
) -> Consumer:
    """Return a consumer that is assigned nothing yet. Does not wait for any broker.

    Raises:
        ConfigError: librdkafka refuses a setting; names it.
    """
    config = {
        **_common_config(settings, troubles, client_id),
        "group.id": group_id,
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "on_commit": _OffsetCommits(group_id),
    }
    try:
        return Consumer(config)
    except KafkaException as error:
        raise _refused_settings(settings, error) from None


def open_admin(settings: KafkaSettings, troubles: ClientTroubles, *, client_id: str) -> AdminClient:
    """Return a client that asks about topics. Does not wait for any broker.

    Raises:
        ConfigError: librdkafka refuses a setting; names it.
    """
    try:
        return AdminClient(_common_config(settings, troubles, client_id))
    except KafkaException as error:
        raise _refused_settings(settings, error) from None


def _common_config(
    settings: KafkaSettings, troubles: ClientTroubles, client_id: str
) -> dict[str, Any]:
    return {
        **TUNED_DEFAULTS,
        **RULES.resolved(settings.options),
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": client_id,
        "error_cb": troubles.note,
    }


def _refused_settings(settings: KafkaSettings, error: KafkaException) -> ConfigError:
    reason = RULES.without_secrets(error_of(error).str(), settings.options)
    return ConfigError(
        f"the Kafka client refuses its settings: {reason}. Options carry librdkafka's names;"
        " see its CONFIGURATION.md"
    )


def close_in_time(consumer: Consumer) -> None:
    """Close `consumer`, and return at the latest after `CLOSE_S`.

    librdkafka waits for offset commits that are under way, and with no broker to answer that lasts
    as long as a request may. It then goes on in the background; nothing else depends on it.
    """
    closing = threading.Thread(target=consumer.close, name="onceflow-kafka-close", daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    if closing.is_alive():
        logger.warning("a Kafka client is still closing after %g s; left behind", CLOSE_S)


def error_of(error: KafkaException) -> KafkaError:
    """Return the error inside `error`."""
    inner = error.args[0] if error.args else None
    if isinstance(inner, KafkaError):
        return inner
    return KafkaError(KafkaError._FAIL, str(error))


def authentication_refused(settings: KafkaSettings, reason: str) -> ConfigError:
    """Return the error that says who was refused and how, never with what password."""
    options = settings.options
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms") or "none"
    user = options.get("sasl.username", "")
    protocol = options.get("security.protocol", "plaintext")
    return ConfigError(
        f"Kafka at {settings.bootstrap_servers} refuses to authenticate"
        f" {f'user {user!r}' if user else 'this client'} (security.protocol={protocol},"
        f" sasl.mechanism={mechanism}): {reason}. Check the mechanism, the user and the password"
    )


def is_denied(code: int) -> bool:
    """Return whether `code` says that an ACL forbids reading the topic."""
    return code in _DENIED_CODES


def access_denied(settings: KafkaSettings, topic: str) -> ConfigError:
    """Return the error that says which right is missing, and the command that grants it."""
    user = settings.options.get("sasl.username", "<user>")
    return ConfigError(
        f"Kafka at {settings.bootstrap_servers} forbids reading topic {topic!r}; grant it:"
        f" kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add"
        f" --allow-principal User:{user} --operation Read --operation Describe --topic {topic}"
    )


class _OffsetCommits:
    """Says once that offsets cannot be published: only lag tools miss them."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        self._failing = False

    def __call__(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        failed = error or next((item.error for item in offsets if item.error), None)
        if failed is None:
            self._failing = False
        elif not self._failing:
            self._failing = True
            logger.warning(
                "offsets cannot be committed to Kafka group %s: %s. Checkpoints are not affected;"
                " only lag tools see old numbers",
                self._group_id,
                failed,
            )


def group_id_of(settings: KafkaSettings, *, job: str, uid: str) -> str:
    """Return the group to which offsets are committed: the user's, or one named after the job."""
    return settings.group_id or f"onceflow-{job}-{uid}"


_INTERVAL_S_MAX = 5.0
_INTERVAL_WHEN_DOWN_S = 1.0
_ANSWER_S = 1.0
"""Also how long `stop` may have to wait."""


class LivenessWatch:
    """Watches the brokers of some partitions, from `start` to `stop`."""

    def __init__(
        self,
        settings: KafkaSettings,
        open_partitions: Callable[[], Sequence[tuple[str, int]]],
        *,
        group_id: str,
        client_id: str,
    ) -> None:
        self._settings = settings
        self._open_partitions = open_partitions
        self._group_id = group_id
        self._client_id = client_id
        self._troubles = ClientTroubles(settings)
        self._stopped = threading.Event()
        self._failure: OnceflowError | None = None
        self._thread = threading.Thread(target=self._watch, name=client_id, daemon=True)

    @property
    def failure(self) -> OnceflowError | None:
        """Why reading is to be given up: the brokers have been away for the whole deadline."""
        return self._failure

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch; its client closes behind it. Safe to call twice."""
        self._stopped.set()

    def _watch(self) -> None:
        interval_s = min(_INTERVAL_S_MAX, self._settings.deadline_s / 4)
        # Most readers of tests and batch jobs are done before anybody need ask.
        if self._stopped.wait(interval_s):
            return
        consumer = open_consumer(
            self._settings, self._troubles, group_id=self._group_id, client_id=self._client_id
        )
        down_since: float | None = None
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            asked_at = time.monotonic()
            reason = self._complaint(consumer)
            # Serves the error callback.
            consumer.poll(0)
            if reason is None:
                self._troubles.clear()
                down_since, pause_s = None, interval_s
                continue
            pause_s = min(interval_s, _INTERVAL_WHEN_DOWN_S)
            down_since = down_since or asked_at
            down_s = time.monotonic() - down_since
            if down_s > self._settings.deadline_s:
                self._failure = self._given_up(reason, down_s)
                break
        close_in_time(consumer)

    def _complaint(self, consumer: Consumer) -> str | None:
        """Return what is wrong, or None when every leader answers."""
        partitions = self._open_partitions()
        try:
            leaders: dict[int, tuple[str, int]] = {}
            for topic in sorted({topic for topic, _ in partitions}):
                if self._stopped.is_set():
                    return None
                metadata = consumer.list_topics(topic, timeout=_ANSWER_S).topics[topic]
                if metadata.error is not None:
                    return f"topic {topic}: {metadata.error.str()}"
                for partition in (number for name, number in partitions if name == topic):
                    known = metadata.partitions.get(partition)
                    if known is None or known.leader < 0:
                        return f"{topic}-{partition} has no leader"
                    leaders.setdefault(known.leader, (topic, partition))
            for topic, partition in leaders.values():
                if self._stopped.is_set():
                    return None
                consumer.get_watermark_offsets(
                    TopicPartition(topic, partition), timeout=_ANSWER_S, cached=False
                )
        except KafkaException as error:
            return error_of(error).str()
        return None

    def _given_up(self, reason: str, down_s: float) -> OnceflowError:
        if self._troubles.authentication:
            return authentication_refused(self._settings, self._troubles.authentication)
        last = self._troubles.last
        return SourceUnavailable(
            f"Kafka at {self._settings.bootstrap_servers} has not served"
            f" {self._settings.what} for {down_s:.0f} s (deadline_s="
            f"{self._settings.deadline_s:g}): {reason}{f'; {last}' if last else ''}. Nothing is"
            " lost: the next attempt goes on from the last checkpoint"
        )
