"""What the server's refusals mean in onceflow's terms."""

from __future__ import annotations

from pymysql.err import MySQLError

DUPLICATE_KEY = 1062
NO_SUCH_TABLE = 1146
NO_SUCH_SESSION = 1094
PRIVILEGE_MISSING = 1227
DENIED = frozenset({1044, 1045, 1142, 1143, PRIVILEGE_MISSING, 1370})
"""Database, login, table, column, privilege over the server, routine."""
LOCK_WAIT_TIMEOUT = 1205
DEADLOCK = 1213
# XA's own.
UNKNOWN_XID = 1397
XA_FATAL = 1401
DUPLICATE_XID = 1440

# A value does not fit its column, or a constraint forbids the row, or a trigger's SIGNAL does.
_ROW_REFUSED = frozenset(
    {1048, DUPLICATE_KEY, 1118, 1169, 1216, 1217, 1261, 1262, 1263, 1264, 1265, 1292, 1300, 1301}
    | {1364, 1365, 1366, 1367, 1369, 1406, 1411, 1416, 1441, 1451, 1452, 1526, 1557, 1586, 1690}
    | {1644, 1748, 1761, 1762, 3819, 4025, 4078}
    # JSON text that is none, in MySQL and in MariaDB.
    | set(range(3140, 3158))
    | set(range(4035, 4045))
)
# The client's: could not connect, gone, lost. The server's: it stops, it ends the session.
_LOST = frozenset({0, 2002, 2003, 2006, 2013, 2014, 2055, 1053, 1077, 1152, 1184, 1927, 3169, 4031})


def code(error: MySQLError) -> int:
    """Return the number of the error."""
    return int(error.args[0]) if error.args and isinstance(error.args[0], int) else 0


def described(error: MySQLError) -> str:
    """Return what the server said, on one line, with the number of the error."""
    text = " ".join(str(part) for part in error.args[1:]) or type(error).__name__
    return f"{' '.join(text.split())} (error {code(error)})"


def is_connection_lost(error: MySQLError) -> bool:
    """Return whether `error` tells that the connection is gone, so the reply never came."""
    return code(error) in _LOST


def is_row_refused(error: MySQLError) -> bool:
    """Return whether the server refuses a row for what is in it: every new attempt would fail."""
    return code(error) in _ROW_REFUSED
