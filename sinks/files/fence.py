"""Who may write under a sink id: one decision log, and of its attempts the newest.

Both are files that are created if absent. The owner's file names the decision log that came first;
each attempt leaves one file, and the highest number is the newest attempt.
"""

from __future__ import annotations

import uuid

import msgspec

from onceflow.core.errors import ConfigError, Fenced
from onceflow.core.spi import CommitterContext
from onceflow.sinks.files.layout import SinkPaths
from onceflow.sinks.files.store import Store

_ATTEMPTS_KEPT = 8


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner's file says."""

    log_id: str
    job: str
    sink_id: str
    token: str
    """Drawn for each claim, so that no two files have the same bytes."""


def claim(store: Store, paths: SinkPaths, context: CommitterContext) -> None:
    """Return when the attempt of `context`, and no older one, may write under its sink id.

    Raises:
        ConfigError: Another job owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
    """
    owner = Owner(
        log_id=context.log_id, job=context.job, sink_id=context.sink_id, token=uuid.uuid4().hex
    )
    if not store.create_if_absent(paths.owner, msgspec.json.encode(owner)):
        _require_owner(store, paths, context)
    _require_newest(store, paths, context)
    mine = paths.attempt(context.attempt)
    if not store.create_if_absent(mine, uuid.uuid4().hex.encode()):
        raise _fenced(context, context.attempt)
    # A newer attempt may have claimed between the two steps.
    _require_newest(store, paths, context, besides=context.attempt)
    for name in store.list(paths.attempts)[:-_ATTEMPTS_KEPT]:
        store.delete(f"{paths.attempts}/{name}")


def _require_owner(store: Store, paths: SinkPaths, context: CommitterContext) -> None:
    place = store.location(paths.owner)
    take_over = (
        "Give this one its own (write(…, sink_id=…)), or, when the other job is stopped for good "
        f"and nothing of it is in doubt, hand its sink id over: delete {place} and "
        f"{store.location(paths.attempts)}"
    )
    try:
        found = msgspec.json.decode(store.read(paths.owner) or b"", type=Owner)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place} does not say which job owns the sink id: {error}") from error
    if found.log_id != context.log_id:
        raise ConfigError(
            f"sink id {context.sink_id!r} belongs to a job with another decision log: recorded "
            f"{found.log_id!r} (job {found.job}), here {context.log_id!r} (job {context.job}). Two "
            f"jobs under one sink id would commit and abort each other's files. {take_over}"
        )


def _require_newest(
    store: Store, paths: SinkPaths, context: CommitterContext, *, besides: int | None = None
) -> None:
    claimed = [int(name) for name in store.list(paths.attempts) if name.isdigit()]
    newest = max((attempt for attempt in claimed if attempt != besides), default=0)
    if newest >= context.attempt:
        raise _fenced(context, newest)


def _fenced(context: CommitterContext, newest: int) -> Fenced:
    return Fenced(
        f"attempt {context.attempt} may not write under sink id {context.sink_id!r}: attempt "
        f"{newest} of the same job has claimed it; this one is out of date and stops"
    )
