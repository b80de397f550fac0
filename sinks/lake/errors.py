"""What libraries of table formats raise, as errors by name.

Catalogs and stores raise what their clients raise (HTTP, SQL, Thrift, AWS), and the libraries' own
errors have no root, so every exception is caught at the calls into them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from onceflow.core.errors import OnceflowError, SinkError


@contextmanager
def library_errors(what: str) -> Generator[None, None, None]:
    """Raise SinkError, which begins with `what`, for whatever a library raises."""
    try:
        yield
    except OnceflowError:
        raise
    except Exception as error:
        raise SinkError(f"{what}: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """Return the first line of what a library says, after the name of its error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
