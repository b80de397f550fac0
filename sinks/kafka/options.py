"""Settings of the Kafka producer: librdkafka's names, Spark's prefix, and what the sink owns."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.core.client_options import OptionRules, OptionValue

SPARK_PREFIX = "kafka."

MESSAGE_BYTES_MAX = "message.max.bytes"
MESSAGE_BYTES_MAX_DEFAULT = 1_000_000
"""librdkafka's; 48 kB under the broker's, which also counts headers and what frames a batch."""

TUNED_DEFAULTS: Mapping[str, OptionValue] = {
    # Java's and Spark's partitioner, so that a key lands where their producers put it.
    "partitioner": "murmur2_random",
    # Fills batches while a checkpoint is produced; a commit does not wait for it.
    "linger.ms": 20,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 262_144,
    # A transaction right after another one is told to wait for its end; 100 ms is librdkafka's.
    "retry.backoff.ms": 10,
    "allow.auto.create.topics": False,
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
    # Its own lines repeat every failed connection attempt; errors are raised with their reason.
    "log_level": 0,
}

_OWNED: Mapping[str, str] = {
    "bootstrap.servers": "give it as bootstrap_servers=",
    "client.id": "it is derived from sink id and subtask",
    "group.id": "it is derived from sink id and subtask",
    "transactional.id": "it is derived from sink id and subtask",
    "transaction.timeout.ms": "give it as transaction_timeout_s=",
    "delivery.timeout.ms": "transaction_timeout_s= bounds it",
    "message.timeout.ms": "transaction_timeout_s= bounds it",
    "enable.idempotence": "it is always on",
    "enable.gapless.guarantee": "a transaction is committed whole or not at all",
    "acks": "it is always all: a commit must survive the leader",
    "request.required.acks": "it is always all: a commit must survive the leader",
    "isolation.level": "proofs are always read committed",
    "enable.auto.commit": "nothing is consumed",
    "key.serializer": "format= and key= say how rows are encoded",
    "value.serializer": "format= says how rows are encoded",
    "interceptor.classes": "there are no interceptors here",
}
_JAVA_ONLY: Mapping[str, str] = {
    "sasl.jaas.config": "give sasl.mechanism, sasl.username and sasl.password instead",
    "sasl.login.callback.handler.class": "for OAUTHBEARER give sasl.oauthbearer.method=oidc",
    "ssl.truststore.location": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.password": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.type": "export the certificates as PEM and give ssl.ca.location",
    "ssl.keystore.type": "a PKCS#12 file goes to ssl.keystore.location as it is",
    "max.request.size": "give message.max.bytes instead",
    "buffer.memory": "give queue.buffering.max.kbytes instead",
    "max.block.ms": "give deadline_s= instead",
    "partitioner.class": "give partitioner=murmur2_random, consistent_random or fnv1a instead",
    "request.timeout.ms": "give socket.timeout.ms instead",
}
_JAVA_FILES: Mapping[str, str] = {
    ".jks": "a Java keystore: export PEM files and give"
    " ssl.ca.location, ssl.certificate.location and ssl.key.location",
}
_SECRET_PARTS = ("password", "secret", "key.pem", "token", "assertion", "sasl.oauthbearer.config")

RULES = OptionRules(
    what="Kafka option",
    prefix=SPARK_PREFIX,
    owned=_OWNED,
    owner="the sink",
    foreign=_JAVA_ONLY,
    foreign_client="the Java client",
    foreign_files=_JAVA_FILES,
    secret_parts=_SECRET_PARTS,
)
