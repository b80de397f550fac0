"""What errors of a session mean in onceflow's terms, by their numbers in `failures`."""

from __future__ import annotations

from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.sinks.mysql.connection import Session, is_lost
from onceflow.sinks.mysql.failures import (
    DENIED,
    DUPLICATE_KEY,
    LOCK_WAIT_TIMEOUT,
    NO_SUCH_TABLE,
    code,
    described,
    is_row_refused,
)
from onceflow.sinks.sql import Failures


class MySQLFailures(Failures[Session, MySQLError]):
    """Goes by the number of the error."""

    @property
    @override
    def errors(self) -> type[MySQLError]:
        return MySQLError

    @override
    def described(self, error: MySQLError) -> str:
        return described(error)

    @override
    def is_lost(self, connection: Session, error: MySQLError) -> bool:
        return is_lost(connection, error)

    @override
    def is_row_refused(self, error: MySQLError) -> bool:
        return is_row_refused(error)

    @override
    def is_duplicate_key(self, error: MySQLError) -> bool:
        return code(error) == DUPLICATE_KEY

    @override
    def is_lock_timeout(self, error: MySQLError) -> bool:
        return code(error) == LOCK_WAIT_TIMEOUT

    @override
    def is_denied(self, error: MySQLError) -> bool:
        return code(error) in DENIED

    @override
    def is_table_missing(self, error: MySQLError) -> bool:
        return code(error) == NO_SUCH_TABLE


FAILURES = MySQLFailures()
