"""Whether two-phase commit is possible in a MySQL or MariaDB server, as it is reached."""

from __future__ import annotations

from onceflow.sinks.mysql.catalog import ServerFacts, may_recover
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.sql.commit_mode import TwoPhaseProspects

# xa_detach_on_prepare; Source: MySQL 8.0.29 release notes.
_DETACH_VERSION = (8, 0, 29)


def two_phase_prospects(session: Session, facts: ServerFacts) -> TwoPhaseProspects:
    """Return what speaks for and against two_phase."""
    return TwoPhaseProspects(
        f"{facts.shown} keeps prepared XA transactions without their session, and the user may "
        "list them",
        _obstacle(session, facts),
    )


def _obstacle(session: Session, facts: ServerFacts) -> str:
    """Return why the server cannot prepare for others to commit; empty when it can."""
    obstacles: tuple[tuple[bool, str], ...] = (
        (
            not facts.mariadb and facts.version < _DETACH_VERSION,
            (
                f"{facts.shown} lets only the session that prepared commit. Upgrade "
                "to MySQL 8.0.29 or newer"
            ),
        ),
        (
            not facts.detaches,
            "xa_detach_on_prepare is OFF. Run: SET PERSIST xa_detach_on_prepare = ON",
        ),
        (facts.galera, "it is a Galera cluster (wsrep_on), which has no XA transactions"),
        (
            facts.binlog_format == "STATEMENT",
            (
                "binlog_format is STATEMENT, and READ COMMITTED needs rows. Run: "
                "SET GLOBAL binlog_format = 'ROW'"
            ),
        ),
        (
            session.is_pooled,
            "a proxy stands between here and the server's sessions; name the server itself",
        ),
        (
            not may_recover(session),
            (
                "the user may not list prepared transactions. Run: "
                f"GRANT XA_RECOVER_ADMIN ON *.* TO {facts.user}"
            ),
        ),
    )
    return next((text for there, text in obstacles if there), "")
