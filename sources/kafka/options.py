"""Settings of the Kafka client: librdkafka's names, Spark's prefix, and which of them are secret.

The engine owns a few (who assigns, who commits, what happens at a gap): giving one is refused with
the name of the argument that does the same. Java's names are refused with librdkafka's.
"""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.core.errors import ConfigError
from onceflow.core.secret_references import followed

OptionValue = str | int | float | bool

SPARK_PREFIX = "kafka."

TUNED_DEFAULTS: Mapping[str, OptionValue] = {
    # A fetcher whose queue is full sleeps for this long. The default of 1000 stalls a reader that
    # takes a queue's worth in less: 137k records/s then, against 324k with 1.
    "fetch.queue.backoff.ms": 1,
    "fetch.error.backoff.ms": 100,
    "isolation.level": "read_committed",
    "allow.auto.create.topics": False,
    # A broker that comes back is found within a second; librdkafka's own maximum is 10 s.
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
    "socket.timeout.ms": 30_000,
    # Whether a batch is what the producer sent; the checksum is the processor's own instruction.
    "check.crcs": True,
    # For group members that stop polling; the reader is none, and backpressure may last.
    "max.poll.interval.ms": 86_400_000,
    # Its own lines repeat every failed connection attempt; the error callback says it once.
    "log_level": 2,
}

_OWNED: Mapping[str, str] = {
    "bootstrap.servers": "give it as bootstrap_servers=",
    "group.id": "give it as group_id=",
    "client.id": "it is derived from job, uid and subtask",
    "auto.offset.reset": "give starting_offsets=, and fail_on_data_loss= for gaps",
    "enable.auto.commit": "offsets belong to checkpoints; commit_offsets= publishes them",
    "auto.commit.enable": "offsets belong to checkpoints; commit_offsets= publishes them",
    "enable.auto.offset.store": "offsets belong to checkpoints; commit_offsets= publishes them",
    "enable.partition.eof": "the reader needs it to find the end of a partition",
    "group.instance.id": "partitions are assigned by the engine and not by a group",
    "group.protocol": "partitions are assigned by the engine and not by a group",
    "partition.assignment.strategy": "partitions are assigned by the engine and not by a group",
    "key.deserializer": "format= says how records are decoded",
    "value.deserializer": "format= says how records are decoded",
    "max.poll.records": "give it as batch_rows=",
    "interceptor.classes": "there are no interceptors here",
}
_JAVA_ONLY: Mapping[str, str] = {
    "sasl.jaas.config": "give sasl.mechanism, sasl.username and sasl.password instead",
    "sasl.login.callback.handler.class": "for OAUTHBEARER give sasl.oauthbearer.method=oidc and"
    " sasl.oauthbearer.client.id, .client.secret and .token.endpoint.url",
    "sasl.client.callback.handler.class": "give sasl.mechanism and its own settings instead",
    "sasl.login.class": "give sasl.mechanism and its own settings instead",
    "ssl.truststore.location": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.password": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.type": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.certificates": "give ssl.ca.pem instead",
    "ssl.keystore.type": "a PKCS#12 file goes to ssl.keystore.location as it is",
    "ssl.keystore.key": "give ssl.key.pem instead",
    "ssl.keystore.certificate.chain": "give ssl.certificate.pem instead",
    "ssl.protocol": "TLS versions are OpenSSL's affair here; leave it away",
    "ssl.enabled.protocols": "TLS versions are OpenSSL's affair here; leave it away",
    "ssl.engine.factory.class": "give ssl.ca.location, ssl.certificate.location, ssl.key.location",
    "security.providers": "leave it away",
    "default.api.timeout.ms": "give deadline_s= instead",
    "request.timeout.ms": "give socket.timeout.ms or deadline_s= instead",
}
_SECRET_PARTS = ("password", "secret", "key.pem", "token", "assertion", "sasl.oauthbearer.config")


def client_options(options: Mapping[str, OptionValue]) -> dict[str, str]:
    """Return `options` under librdkafka's names, as text.

    Raises:
        ConfigError: One is Java's, or belongs to the engine; says what to give instead.
    """
    found: dict[str, str] = {}
    for given, value in options.items():
        name = given.removeprefix(SPARK_PREFIX)
        advice = _JAVA_ONLY.get(name) or _OWNED.get(name)
        if advice is not None:
            whose = "is the Java client's" if name in _JAVA_ONLY else "is set by the engine"
            raise ConfigError(f"Kafka option {given!r} {whose}: {advice}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text.endswith(".jks"):
            raise ConfigError(
                f"Kafka option {given!r} names a Java keystore: convert it with `keytool"
                " -importkeystore -deststoretype PKCS12`, or export PEM files and give"
                " ssl.ca.location, ssl.certificate.location and ssl.key.location"
            )
        if found.setdefault(name, text) != text:
            raise ConfigError(f"Kafka option {name!r} is given twice, with different values")
    return found


def resolved_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return `options` with references to secrets followed, for a client about to be opened.

    Raises:
        ConfigError: One cannot be followed here.
    """
    return {
        name: followed(value, setting=f"Kafka option {name!r}") for name, value in options.items()
    }


def is_secret(name: str) -> bool:
    """Return whether the value of option `name` must never be printed."""
    return any(part in name.lower() for part in _SECRET_PARTS)


def printable(options: Mapping[str, str]) -> dict[str, str]:
    """Return `options` with every secret value hidden."""
    return {name: "***" if is_secret(name) else value for name, value in options.items()}


def without_secrets(text: str, options: Mapping[str, str]) -> str:
    """Return `text` with every secret value of `options` hidden in it."""
    for name, value in resolved_options(options).items():
        if is_secret(name) and value:
            text = text.replace(value, "***")
    return text
