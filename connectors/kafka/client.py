"""How Kafka clients are opened, what they report, and what their errors mean."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from onceflow.connectors.kafka.librdkafka_options import LIBRDKAFKA
from onceflow.connectors.kafka.settings import KafkaCluster, TopicSettings
from onceflow.core.errors import SettingsRefused
from onceflow.core.spi.client_options import OptionValue

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
"""The last one is often "all brokers are down"; the one before it says why."""


class ClientTroubles:
    """Remembers what went wrong in a client; given to it as its error callback.

    Called on whatever thread polls the client.
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        self._options = cluster.options
        self._lock = threading.Lock()
        self._reports: dict[int, str] = {}
        self._authentication = ""

    @property
    def last(self) -> str:
        """The newest reports, without secrets; empty when there is none."""
        with self._lock:
            return "; ".join(list(self._reports.values())[-_REPORTS_SHOWN:])

    @property
    def authentication(self) -> str:
        """What the broker said when it refused who we are; empty when it did not."""
        return self._authentication

    @property
    def latest(self) -> str:
        """The newest report, without secrets; empty when there is none."""
        return next(reversed(self._reports.values()), "")

    def note(self, error: KafkaError) -> None:
        """Remember `error`."""
        self.remember(error)

    def clear(self) -> None:
        """Forget everything: the client works again."""
        with self._lock:
            self._reports.clear()
            self._authentication = ""

    def remember(self, error: KafkaError) -> bool:
        """Keep `error`; return whether nothing of its kind has been reported since `clear`."""
        text, code = hide_secrets(error.str(), self._options), error.code()
        with self._lock:
            # Taken out and put in again, so that the newest stands last; one of each kind, for the
            # same one comes once a second while a broker is away.
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
    """Return the settings of a client: `defaults`, below the user's options.

    Raises:
        ConfigError: A reference to a secret cannot be followed.
    """
    config: dict[str, Any] = {
        **defaults,
        # Above the defaults, and below what follows: a user may tune a client, and not send it
        # elsewhere.
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
        SettingsRefused: librdkafka refuses a setting, or a file that it names; names it.
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
    # Some bindings raise it with a text alone.
    inner = error.args[0] if error.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(error))


def describe_error(error: KafkaException, cluster: KafkaCluster) -> str:
    """Return what Kafka said, with its code and without secrets."""
    inner = error_of(error)
    return f"{hide_secrets(inner.str(), cluster.options)} ({inner.name()})"


def hide_secrets(text: str, options: Mapping[str, str]) -> str:
    """Return `text` without the secrets among `options`."""
    return LIBRDKAFKA.without_secrets(text, options)


def make_login_error(cluster: KafkaCluster, reason: str) -> SettingsRefused:
    """Return the error that says who was refused and how, never with what password."""
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
    """Return whether `code` says that an ACL forbids the use of a topic."""
    return code in _DENIED_CODES


def make_access_error(settings: TopicSettings, topic: str) -> SettingsRefused:
    """Return the error that says which right is missing, and the command that grants it."""
    user = settings.options.get("sasl.username", "<user>")
    doing = settings.operation.lower().removesuffix("e") + "ing"
    return SettingsRefused(
        f"Kafka at {settings.bootstrap_servers} forbids {doing} topic {topic!r}; grant it:"
        f" kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add"
        f" --allow-principal User:{user} --operation {settings.operation} --operation Describe"
        f" --topic {topic}"
    )
