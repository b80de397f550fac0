"""The distinction between failures caused by a value and those caused by a network or a disk."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from onceflow.core.errors import BadRow, TargetRefused

_ABOUT_A_NAME = frozenset({errno.ENAMETOOLONG, errno.EILSEQ})
"""The operating system errors about a name that was passed to it, and not about a disk."""

_CAUSES_MAX = 20
"""The maximum number of errors examined in a chain: chains of causes may be circles."""

_NETWORK_WORDS = ("connect", "timeout", "timedout", "unavailable")
"""The words in names of error classes that drivers use for a server that is away."""

_DATA_AT_FAULT = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    NotImplementedError,
    AssertionError,
)
"""The errors that code raises for a value that it cannot handle. Arrow's errors are subclasses of
these."""


def may_pass(error: BaseException) -> bool:
    """Return True if the network, a disk or a lack of memory may have caused `error`.

    Such a failure may end without a change by a person.
    """
    return any(
        cause.errno not in _ABOUT_A_NAME
        if isinstance(cause, OSError)
        else isinstance(cause, MemoryError) or _is_named_for_network(type(cause))
        for cause in _walk_causes(error)
    )


def is_data_at_fault(error: BaseException) -> bool:
    """Return True if the cause of `error` is a value that code, or a file system, cannot take."""
    if may_pass(error):
        return False
    # Follow only explicit causes: an error that was being handled meanwhile need not be the cause.
    named: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if named is None or isinstance(named, (*_DATA_AT_FAULT, OSError)):
            break
        named = named.__cause__
    return isinstance(named, (*_DATA_AT_FAULT, OSError))


def waits_for_person(error: BaseException) -> bool:
    """Return True if a commit that fails by `error` fails until a person changes something.

    A committer then returns `RetryLater(…, until_mended=True)`, and the status calls the commit
    stuck.
    """
    return isinstance(error, (BadRow, TargetRefused)) or is_data_at_fault(error)


def _is_named_for_network(error_class: type[BaseException]) -> bool:
    names = (base.__name__.lower() for base in error_class.__mro__)
    return any(word in name for name in names for word in _NETWORK_WORDS)


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the errors behind it, each once: chains of causes may be circles."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
