"""What tests of jobs and sinks are written with: the conformance kit, servers, faults, judges.

The fixtures of the pytest plugin need no import; their types are here. Needs the extra `testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports import lazy_names

if TYPE_CHECKING:
    from onceflow.integration.conformance import (
        Clause,
        ClauseOutcome,
        ClauseResult,
        NotTestable,
        SinkConformance,
        SinkTarget,
        SourceConformance,
        SourceInput,
        StateBackendConformance,
        Violation,
        run_clauses,
    )
    from onceflow.integration.faults import (
        TcpProxy,
        kill_process,
        kill_tree,
        pause_tree,
        process_tree,
        unpause_tree,
    )
    from onceflow.integration.judge import NoVerdict, Verdict, verify, verify_topic
    from onceflow.integration.pytest_plugin import (
        DatabaseFactory,
        KafkaFactory,
        TopicFactory,
    )
    from onceflow.integration.servers import (
        DatabaseServer,
        KafkaServer,
        MySQLServer,
        OwnDatabase,
        OwnKafka,
        PostgresServer,
        ServerError,
        make_kafka,
        make_mariadb,
        make_mysql,
        make_postgres,
    )
    from onceflow.integration.workload import PAYMENT_SCHEMA, Payments, produce
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.integration.conformance": (
                "Clause ClauseOutcome ClauseResult NotTestable SinkConformance SinkTarget"
                " SourceConformance SourceInput StateBackendConformance Violation run_clauses"
            ),
            "onceflow.integration.faults": (
                "TcpProxy kill_process kill_tree pause_tree process_tree unpause_tree"
            ),
            "onceflow.integration.judge": "NoVerdict Verdict verify verify_topic",
            "onceflow.integration.pytest_plugin": ("DatabaseFactory KafkaFactory TopicFactory"),
            "onceflow.integration.servers": (
                "DatabaseServer KafkaServer MySQLServer OwnDatabase OwnKafka PostgresServer"
                " ServerError make_kafka make_mariadb make_mysql make_postgres"
            ),
            "onceflow.integration.workload": "PAYMENT_SCHEMA Payments produce",
        },
    )

__all__ = [
    "PAYMENT_SCHEMA",
    "Clause",
    "ClauseOutcome",
    "ClauseResult",
    "DatabaseFactory",
    "DatabaseServer",
    "KafkaFactory",
    "KafkaServer",
    "MySQLServer",
    "NoVerdict",
    "NotTestable",
    "OwnDatabase",
    "OwnKafka",
    "Payments",
    "PostgresServer",
    "ServerError",
    "SinkConformance",
    "SinkTarget",
    "SourceConformance",
    "SourceInput",
    "StateBackendConformance",
    "TcpProxy",
    "TopicFactory",
    "Verdict",
    "Violation",
    "kill_process",
    "kill_tree",
    "make_kafka",
    "make_mariadb",
    "make_mysql",
    "make_postgres",
    "pause_tree",
    "process_tree",
    "produce",
    "run_clauses",
    "unpause_tree",
    "verify",
    "verify_topic",
]
