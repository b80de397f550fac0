"""The removal of orphans: data files whose writer was killed before it had described them.

    1. list the files of the sink id's earlier attempts that are old enough
    2. leave out files that a staged description names: they wait for their commit or abort
    3. leave out files that a version of the table needs
    4. delete the other files

Runs after the attempt has claimed the log and the table. From then on no checkpoint is decided
under an earlier attempt, and all decided ones are staged or committed. An overtaken driver's commit
moves files from staged descriptions into a version, so they are read in this order. Files of other
writers have other names.
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
"""The limit of deleted files per start, which waits for the deletion. The next start continues."""


def try_to_remove_orphans(table: LakeTable, context: CommitterContext, age_s: float) -> None:
    """Remove orphan files that are older than `age_s`; if that is not possible now, log why."""
    try:
        removed = remove_orphans(table, context, age_s)
    except OnceflowError as error:
        _logger.warning("sink %s: orphan files are left: %s", context.sink_id, error)
        return
    if removed:
        _logger.info("sink %s: %d orphan files removed", context.sink_id, removed)


def remove_orphans(table: LakeTable, context: CommitterContext, age_s: float) -> int:
    """Delete at most `DELETED_MAX` files as the module says; return their number.

    Raises:
        OnceflowError: The table or staged descriptions cannot be read, so no file was deleted.
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
