"""How a Kafka client is opened here, and what it reported while it could not do its work."""

from __future__ import annotations

import logging
import threading
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from onceflow.core.errors import ConfigError
from onceflow.sources.kafka.options import RULES, TUNED_DEFAULTS
from onceflow.sources.kafka.settings import KafkaSettings

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
