"""The opening of Kafka clients, the record of their reports, and the meaning of their errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from onceflow.clients.kafka.settings import LIBRDKAFKA, KafkaCluster, TopicSettings
from onceflow.core.errors import SettingsRefused
from onceflow.core.spi.options import OptionValue

_Client = TypeVar("_Client")

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
_REPORTS_SHOWN = 2
"""The number of reports in `last`.

The newest is often "all brokers are down"; the one before it says why.
"""


class ClientTroubles:
    """The errors that a client has reported through its error callback.

    The callback runs on the thread that polls the client.
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        self._options = cluster.options
        self._lock = threading.Lock()
        self._reports: dict[int, str] = {}
        self._authentication = ""

    @property
    def last(self) -> str:
        """The newest reports, without secrets; empty if there are none."""
        with self._lock:
            return "; ".join(list(self._reports.values())[-_REPORTS_SHOWN:])

    @property
    def authentication(self) -> str:
        """The text with which the broker refused to authenticate; empty if it did not refuse."""
        return self._authentication

    @property
    def latest(self) -> str:
        """The newest report, without secrets; empty if there is none."""
        return next(reversed(self._reports.values()), "")

    def note(self, error: KafkaError) -> None:
        """Remember `error`."""
        self.remember(error)

    def clear(self) -> None:
        """Forget all reports, because the client works again."""
        with self._lock:
            self._reports.clear()
            self._authentication = ""

    def remember(self, error: KafkaError) -> bool:
        """Keep `error`. Return True if no error with its code was reported since `clear`."""
        text, code = hide_secrets(error.str(), self._options), error.code()
        with self._lock:
            # Remove and insert it again, so that the newest is last. Keep one of each code, because
            # the same error is reported every second while a broker is down.
            is_new = self._reports.pop(code, None) is None
            self._reports[code] = text
            if code in _AUTHENTICATION_CODES:
                self._authentication = text
        return is_new


def client_config(
    cluster: KafkaCluster,
    client_id: str,
    defaults: Mapping[str, OptionValue],
    troubles: ClientTroubles | None = None,
) -> dict[str, Any]:
    """Return the settings of a client: `defaults`, overridden by the user's options.

    Raises:
        ConfigError: A reference to a secret cannot be resolved.
    """
    config: dict[str, Any] = {
        **defaults,
        # The user's options override the defaults, but not the entries below: a user may tune a
        # client, but not connect it elsewhere.
        **LIBRDKAFKA.resolve_secrets(cluster.options),
        "bootstrap.servers": cluster.bootstrap_servers,
        "client.id": client_id,
    }
    if troubles is not None:
        config["error_cb"] = troubles.note
    return config


def open_client(
    construct: Callable[[dict[str, Any]], _Client], config: dict[str, Any], cluster: KafkaCluster
) -> _Client:
    """Return `construct(config)`. Does not wait for any broker.

    Raises:
        SettingsRefused: librdkafka refuses a setting, or a file that it names. The message names
            the setting.
    """
    try:
        return construct(config)
    except KafkaException as error:
        raise SettingsRefused(
            f"the Kafka client refuses its settings: {describe_error(error, cluster)}. Options"
            " carry librdkafka's names; see its CONFIGURATION.md"
        ) from None


def error_of(error: KafkaException) -> KafkaError:
    """Return the error inside `error`."""
    # Some bindings raise it with only a text.
    inner = error.args[0] if error.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(error))


def describe_error(error: KafkaException, cluster: KafkaCluster) -> str:
    """Return Kafka's message with its code, without secrets."""
    inner = error_of(error)
    return f"{hide_secrets(inner.str(), cluster.options)} ({inner.name()})"


def hide_secrets(text: str, options: Mapping[str, str]) -> str:
    """Return `text` without the secrets among `options`."""
    return LIBRDKAFKA.without_secrets(text, options)


def make_login_error(cluster: KafkaCluster, reason: str) -> SettingsRefused:
    """Return the error that names the refused user and the mechanism, but never the password."""
    options = cluster.options
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms") or "none"
    user = options.get("sasl.username", "")
    protocol = options.get("security.protocol", "plaintext")
    return SettingsRefused(
        f"Kafka at {cluster.bootstrap_servers} refuses to authenticate"
        f" {f'user {user!r}' if user else 'this client'} (security.protocol={protocol},"
        f" sasl.mechanism={mechanism}): {reason}. Check the mechanism, the user and the password"
    )


def is_denied(code: int) -> bool:
    """Return True if `code` says that an ACL forbids the use of a topic."""
    return code in _DENIED_CODES


def make_access_error(settings: TopicSettings, topic: str) -> SettingsRefused:
    """Return the error that names the missing right, and the command that grants it."""
    user = settings.options.get("sasl.username", "<user>")
    doing = settings.operation.lower().removesuffix("e") + "ing"
    return SettingsRefused(
        f"Kafka at {settings.bootstrap_servers} forbids {doing} topic {topic!r}; grant it:"
        f" kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add"
        f" --allow-principal User:{user} --operation {settings.operation} --operation Describe"
        f" --topic {topic}"
    )
