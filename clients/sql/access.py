"""The options by which a database is reached, shared by its sink and its source."""

from __future__ import annotations

from dataclasses import dataclass, field

from onceflow.core.spi.options import DURATION, option


@dataclass(frozen=True, kw_only=True, repr=False)
class DatabaseAccess:
    """The address of a database, the user who connects, and the timeouts."""

    url: str = field(
        kw_only=False,
        metadata=option(
            "Where the database is; its JDBC URL (`jdbc:…`) will do", spark="url", secret=True
        ),
    )
    user: str | None = field(
        default=None, metadata=option("Overrides the user in the url", spark="user")
    )
    password: str | None = field(
        default=None,
        metadata=option(
            "Overrides the password in the url, and needs no percent-encoding. `${env:NAME}` or"
            " `${file:/path}` refers to a secret: each process that connects looks it up, and no"
            " pickle contains it",
            spark="password",
            secret=True,
        ),
    )
    connect_timeout_s: float = field(
        default=10.0,
        metadata=option(
            "Timeout of one connection attempt. After a lost reply to a commit, the committer also"
            " asks for this long whether the commit happened",
            DURATION,
            spark="connectTimeout",
        ),
    )
    statement_timeout_s: float = field(
        default=120.0,
        metadata=option(
            "How long to wait for the server's reply before the connection is closed",
            DURATION,
            spark="statementTimeout",
            aliases=("queryTimeout",),
        ),
    )
