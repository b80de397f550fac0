"""Settings of the Kafka client: librdkafka's names, Spark's prefix, and which of them are secret.

The engine owns a few (who assigns, who commits, what happens at a gap): giving one is refused with
the name of the argument that does the same. Java's names are refused with librdkafka's.
"""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.core.client_options import OptionRules, OptionValue

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
_JAVA_FILES: Mapping[str, str] = {
    ".jks": "a Java keystore: convert it with `keytool"
    " -importkeystore -deststoretype PKCS12`, or export PEM files and give"
    " ssl.ca.location, ssl.certificate.location and ssl.key.location",
}
_SECRET_PARTS = ("password", "secret", "key.pem", "token", "assertion", "sasl.oauthbearer.config")

RULES = OptionRules(
    what="Kafka option",
    prefix=SPARK_PREFIX,
    owned=_OWNED,
    owner="the engine",
    foreign=_JAVA_ONLY,
    foreign_client="the Java client",
    foreign_files=_JAVA_FILES,
    secret_parts=_SECRET_PARTS,
)
