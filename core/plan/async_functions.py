"""Functions that call services, and how their calls are limited and repeated.

A call is in flight until its result is emitted. Records in flight are part of each checkpoint, and
are called again after a restore. So the service may get a record more than once, and the results
of each record are emitted exactly once.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import seconds_of
from onceflow.core.state.keys.key_codec import encode_map_key
from onceflow.core.state.keys.key_columns import check_key_type

CAPACITY_MAX = 100_000


class AsyncFunction(ABC):
    """A function that calls a service for each record, with resources of its own.

    Pickled to the slots: create clients in `open`, not in `__init__`. One instance serves one
    subtask. All methods run on the event loop of the operator, a thread of its own. So they must
    not block: call a blocking library by `asyncio.to_thread`.
    """

    async def open(self) -> None:  # noqa: B027 - optional hook
        """Create clients and other resources. Called once, before the first record."""

    @abstractmethod
    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return the output for a record, its first argument: a record, several records, or None.

        The second argument is the idempotency key, if the operator has one. Of
        `async_map_batches`, the argument and the result are Arrow batches.
        """

    async def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` created. Not called when the process is killed."""


Call: TypeAlias = AsyncFunction | Callable[..., Awaitable[Any]]


@check_fields
@dataclass(frozen=True, slots=True)
class CallRetries:
    """The repetition of a call that fails: `CallRetries(tries=5, delay="200 ms")`.

    A call has at most `tries` tries. The pause before the second one is `delay`. Each further pause
    is twice as long, up to `longest`. Only errors of the classes `on` are followed by another try.
    """

    tries: int = 3
    delay: float | str = 0.1
    longest: float | str = 10.0
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigError(f"CallRetries(tries={self.tries}): a call has 1 try or more")
        seconds_of(self.delay, setting="delay")
        seconds_of(self.longest, setting="longest")

    def pause_s(self, tries: int) -> float:
        """Return the pause after this number of tries."""
        first_s = seconds_of(self.delay, setting="delay")
        # Bound the exponent: a float has no power of two beyond 1023.
        return min(first_s * 2.0 ** min(tries - 1, 60), seconds_of(self.longest, setting="longest"))


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The limits of the calls of one subtask."""

    capacity: int
    """The number of calls that run at once."""
    timeout_s: float
    """The time that one try may take."""
    retries: CallRetries
    ordered: bool
    """True if results are emitted in the order of the records."""
    calls_per_s: float | None
    """The number of tries that begin in a second, or None for no limit."""


def limit_calls(
    owner: str,
    capacity: int,
    timeout: float | str,
    retry: CallRetries | None,
    ordered: bool,
    rate_limit: float | None,
) -> CallLimits:
    """Return the limits from a user's arguments.

    Raises:
        ConfigError: An argument is out of its range.
    """
    if not 1 <= capacity <= CAPACITY_MAX:
        raise ConfigError(f"{owner}(capacity={capacity}): give 1 to {CAPACITY_MAX:,} calls")
    timeout_s = seconds_of(timeout, setting="timeout")
    if timeout_s <= 0:
        raise ConfigError(f"{owner}(timeout={timeout!r}) must be more than 0")
    if rate_limit is not None and rate_limit <= 0:
        raise ConfigError(f"{owner}(rate_limit={rate_limit}): give a number of calls above 0")
    return CallLimits(capacity, timeout_s, retry or CallRetries(tries=1), ordered, rate_limit)


def require_coroutine(function: object, owner: str) -> None:
    """Raise ConfigError unless `function` is a coroutine function or an `AsyncFunction`."""
    if not (isinstance(function, AsyncFunction) or iscoroutinefunction(function)):
        name = getattr(function, "__name__", repr(function)[:80])
        raise ConfigError(
            f"{owner}() takes a coroutine function (async def) or an AsyncFunction object, and was"
            f" given {name}. For a blocking library: return await asyncio.to_thread(…)"
        )


def check_idempotency_key(columns: Sequence[str], schema: pa.Schema) -> None:
    """Raise ConfigError unless `columns` of `schema` can identify a record."""
    for column in columns:
        if column not in schema.names:
            raise ConfigError(
                f"async_map(idempotency_key={column!r}): no such column; there are"
                f" {', '.join(schema.names)}"
            )
        check_key_type(schema.field(column).type, column)


def idempotency_key(job: str, uid: str, key: Any) -> str:
    """Return the text that identifies the record with this key for a service.

    It must not change: a service compares it with that of an earlier call.

    Raises:
        BadStateValue: The key is null.
    """
    parts = job.encode(), uid.encode(), encode_map_key(key)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:40]
