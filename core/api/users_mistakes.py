"""The shortening of tracebacks for user errors, so that they end at the user's own call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from typing_extensions import ParamSpec

from onceflow.core.errors import OnceflowError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def without_internal_frames(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `call`, so that its errors of domain "user" have no traceback frames of the engine.

    The error keeps its causes. A DEBUG log line has the whole traceback.
    """

    @wraps(call)
    def with_short_traceback(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except OnceflowError as error:
            if error.domain != "user":
                raise
            _log.debug("the whole traceback of a user's mistake", exc_info=True)
            mistake = error
        raise mistake.with_traceback(None) from _shorten_cause(mistake)

    return with_short_traceback


def _shorten_cause(error: BaseException) -> BaseException | None:
    """Return the first cause of another type, and remove the tracebacks of it and its causes."""
    cause = error.__cause__
    while cause is not None and type(cause) is type(error):
        cause = cause.__cause__
    below = cause
    while below is not None:
        below.__traceback__ = None
        below.__suppress_context__ = True
        below = below.__cause__
    return cause
