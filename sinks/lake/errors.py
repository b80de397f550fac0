"""The errors of table format libraries, turned into named errors.

Catalogs and stores raise the errors of their clients (HTTP, SQL, Thrift, AWS), and the libraries'
own errors have no common base class. So every exception is caught at the calls into them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from onceflow.core.errors import OnceflowError, SinkError


@contextmanager
def library_errors(what: str) -> Generator[None, None, None]:
    """Raise SinkError, whose text begins with `what`, for any exception of a library."""
    try:
        yield
    except OnceflowError:
        raise
    except Exception as error:
        raise SinkError(f"{what}: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """Return the name of a library's error, and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
