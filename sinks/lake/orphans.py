"""Removes data files that nothing names: a writer was killed before it had described them.

    1. list the files of the sink id's earlier attempts that are old enough
    2. leave out what a staged description names: it waits for its commit, or for its abort
    3. leave out what a version of the table needs
    4. delete the rest

Runs once the attempt has claimed the log and the table: nothing is decided under an earlier attempt
any more, and all that was is staged or committed. A commit of an overtaken driver moves files from
what is staged into a version, so these are looked at in this order. Other writers' files have other
names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

from onceflow.core.errors import OnceflowError
from onceflow.core.spi import CommitterContext
from onceflow.core.spi.staging import StagingArea, require_staging
from onceflow.sinks.lake.data_file_names import compile_own_name, to_name
from onceflow.sinks.lake.table import LakeTable

_logger = logging.getLogger("onceflow.sinks.lake")

DELETED_MAX = 1000
"""Files at one start, which waits for it. The next start goes on."""


def try_to_remove_orphans(table: LakeTable, context: CommitterContext, age_s: float) -> None:
    """Remove orphan files that are older than `age_s`; log why if that is not possible now."""
    try:
        removed = remove_orphans(table, context, age_s)
    except OnceflowError as error:
        _logger.warning("sink %s: orphan files are left: %s", context.sink_id, error)
        return
    if removed:
        _logger.info("sink %s: %d orphan files removed", context.sink_id, removed)


def remove_orphans(table: LakeTable, context: CommitterContext, age_s: float) -> int:
    """Delete at most `DELETED_MAX` files as the module says; return how many.

    Raises:
        OnceflowError: Table or staged descriptions cannot be read, so nothing was deleted.
    """
    staging = require_staging(context.staging, context.sink_id, "the description of data files is")
    # 1.
    before = datetime.now(timezone.utc) - timedelta(seconds=age_s)
    own_name = compile_own_name(context.sink_id)
    paths: dict[str, str] = {}
    for path, modified in table.list_files():
        match = own_name.fullmatch(to_name(path))
        if match and int(match[1]) < context.attempt and modified < before:
            paths[to_name(path)] = path
    # 2.
    for name in _list_staged_names(table, staging):
        paths.pop(name, None)
    if not paths:
        return 0
    # 3.
    unnamed = sorted(table.load().find_unnamed(paths.keys()))[:DELETED_MAX]
    # 4.
    table.delete_files([paths[name] for name in unnamed])
    return len(unnamed)


def _list_staged_names(table: LakeTable, staging: StagingArea) -> Iterator[str]:
    for transaction in staging.transactions():
        for _, description in staging.read(transaction) or ():
            yield from map(to_name, table.list_paths(description))
