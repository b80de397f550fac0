"""How a database is reached: options that writing to it and reading from it share."""

from __future__ import annotations

from dataclasses import dataclass, field

from onceflow.core.spi.options import DURATION, option


@dataclass(frozen=True, kw_only=True, repr=False)
class DatabaseAccess:
    """Where a database is, who connects, and how long an answer is waited for."""

    url: str = field(
        kw_only=False,
        metadata=option(
            "Where the database is; its JDBC URL (`jdbc:…`) will do", spark="url", secret=True
        ),
    )
    user: str | None = field(default=None, metadata=option("Over what the url says", spark="user"))
    password: str | None = field(
        default=None,
        metadata=option(
            "Over what the url says; needs no percent-encoding. `${env:NAME}` or `${file:/path}`"
            " refers to a secret, which is then in no pickle: each process that connects looks it"
            " up",
            spark="password",
            secret=True,
        ),
    )
    connect_timeout_s: float = field(
        default=10.0,
        metadata=option(
            "How long one connection may take; a committer keeps asking for as long after a reply"
            " was lost",
            DURATION,
            spark="connectTimeout",
        ),
    )
    statement_timeout_s: float = field(
        default=120.0,
        metadata=option(
            "How long the server may be silent before the connection is given up",
            DURATION,
            spark="statementTimeout",
            aliases=("queryTimeout",),
        ),
    )
