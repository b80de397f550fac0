"""How long a broker keeps what proves a commit, and whether rows have waited longer than that."""

from __future__ import annotations

import time

from confluent_kafka.admin._config import ConfigResource

from onceflow.core.errors import ConfigError
from onceflow.sinks.kafka.clients import Admin, Troubles, answered, open_admin
from onceflow.sinks.kafka.settings import KafkaSinkSettings, StaleRows

RETENTION_MINUTES_MIN = 24 * 60
"""What `check` demands of the broker; its default is a week, and was a day before Kafka 2.0."""

_TRUSTED_S = RETENTION_MINUTES_MIN * 60 / 2
"""For how long nobody is asked: half the minimum, which leaves hours for clocks that differ."""
_MARGIN_S = 3600.0
_RETENTION = "offsets.retention.minutes"


def is_proof_expired(settings: KafkaSinkSettings, staged_at_s: float) -> bool:
    """Return whether a commit of rows staged at `staged_at_s` might have been forgotten by now.

    Always false where the user said to produce such rows.

    Raises:
        SinkError: The broker cannot be asked now.
    """
    age_s = time.time() - staged_at_s
    if age_s < _TRUSTED_S or settings.stale_rows is StaleRows.PRODUCE:
        return False
    troubles = Troubles(settings)
    minutes = retention_minutes(settings, open_admin(settings, troubles), troubles)
    return minutes is None or age_s > minutes * 60 - _MARGIN_S


def retention_minutes(
    settings: KafkaSinkSettings, admin: Admin, troubles: Troubles
) -> float | None:
    """Return the broker's offsets.retention.minutes; None when we may not read it.

    Raises:
        SinkError: No broker answered in time.
    """
    cluster = answered(
        settings, troubles, lambda wait_s: admin.list_topics(timeout=wait_s), settings.where
    )
    broker = ConfigResource("BROKER", str(min(cluster.brokers)))
    text = configuration(settings, admin, troubles, broker).get(_RETENTION)
    return None if text is None else float(text)


def configuration(
    settings: KafkaSinkSettings, admin: Admin, troubles: Troubles, resource: ConfigResource
) -> dict[str, str]:
    """Return the settings of a topic or broker; empty when we may not read them.

    Raises:
        SinkError: No broker answered in time.
    """

    def ask(timeout_s: float) -> dict[str, str]:
        future = admin.describe_configs([resource], request_timeout=timeout_s)[resource]
        entries = future.result(timeout_s + 1)
        return {name: entry.value for name, entry in entries.items() if entry.value is not None}

    try:
        return answered(settings, troubles, ask, f"settings of {resource}")
    except ConfigError:
        if troubles.authentication:
            raise
        return {}
