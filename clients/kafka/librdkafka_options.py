"""The rules for librdkafka options: replacements of Java's options, secrets, and tuned defaults.

Options have librdkafka's names, with or without Spark's prefix. Source and sink each set some
options themselves. They refuse such an option, and the error names the argument that does the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.core.spi.options import OptionRules, OptionValue

DEFAULTS: Mapping[str, OptionValue] = {
    "allow.auto.create.topics": False,
    # The client finds a broker that comes back within a second; librdkafka's own maximum is 10 s.
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
}
"""The settings of every client, unless the user overrides them."""

_PEM = "export the certificates as PEM and give ssl.ca.location"
_TLS_VERSIONS = "OpenSSL chooses the TLS version here; omit it"

LIBRDKAFKA = OptionRules(
    what="Kafka option",
    prefix="kafka.",
    owned={},
    owner="onceflow",
    foreign={
        "sasl.jaas.config": "give sasl.mechanism, sasl.username and sasl.password instead",
        "sasl.login.callback.handler.class": "for OAUTHBEARER give sasl.oauthbearer.method=oidc and"
        " sasl.oauthbearer.client.id, .client.secret and .token.endpoint.url",
        "sasl.client.callback.handler.class": "give sasl.mechanism and its own settings instead",
        "sasl.login.class": "give sasl.mechanism and its own settings instead",
        "ssl.truststore.location": _PEM,
        "ssl.truststore.password": _PEM,
        "ssl.truststore.type": _PEM,
        "ssl.truststore.certificates": "give ssl.ca.pem instead",
        "ssl.keystore.type": "give the PKCS#12 file itself in ssl.keystore.location",
        "ssl.keystore.key": "give ssl.key.pem instead",
        "ssl.keystore.certificate.chain": "give ssl.certificate.pem instead",
        "ssl.protocol": _TLS_VERSIONS,
        "ssl.enabled.protocols": _TLS_VERSIONS,
        "ssl.engine.factory.class": "give ssl.ca.location, ssl.certificate.location,"
        " ssl.key.location",
        "security.providers": "omit it",
        "default.api.timeout.ms": "give deadline_s= instead",
        "request.timeout.ms": "give socket.timeout.ms or deadline_s= instead",
    },
    foreign_client="the Java client",
    foreign_files={
        ".jks": "a Java keystore: convert it with `keytool"
        " -importkeystore -deststoretype PKCS12`, or export PEM files and give"
        " ssl.ca.location, ssl.certificate.location and ssl.key.location",
    },
    secret_parts=(
        *("password", "secret", "key.pem", "token", "assertion"),
        "sasl.oauthbearer.config",
    ),
)
"""The rules for every client. Source and sink add the options that they set themselves."""
