"""The refusal of tables in a format version that the sink does not write, with the remedy."""

from __future__ import annotations

from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table

FORMAT_VERSION = 2


def refuse_format_version(address: str, table: Table) -> str:
    """Return why the sink cannot write to `table`, with the remedy; empty if it can.

    If the table has a later version, read its former metadata files, the newest first.
    """
    version = table.metadata.format_version
    if version == FORMAT_VERSION:
        return ""
    refusal = (
        f"{address} has format version {version}, and the sink writes version"
        f" {FORMAT_VERSION} alone: "
    )
    if version < FORMAT_VERSION:
        return (
            f"{refusal}version 1 has no sequence numbers. Upgrade the table: ALTER TABLE … SET"
            f" TBLPROPERTIES ('format-version'='{FORMAT_VERSION}')"
        )
    file = _find_last_metadata_file(table)
    if not file:
        return (
            f"{refusal}pyiceberg does not write version {version}, and no metadata file of version"
            f" {FORMAT_VERSION} in the table's log can be read. If storage has one, make it"
            f" readable, and start the job again. Otherwise create another table of version"
            f" {FORMAT_VERSION}, and have a new job write to it. If rows of the former job wait for"
            " their commit, the new job must read them from its sources again"
        )
    return (
        f"{refusal}pyiceberg does not write version {version}. Register the last metadata file of"
        f" version {FORMAT_VERSION} as another table, in Spark by CALL system.register_table(table"
        f" => 'NAMESPACE.NEW_NAME', metadata_file => '{file}'), and start the job with a sink for"
        " that table: it then commits the rows that wait for their commit. Rows that other programs"
        " have written since the upgrade are in the former table alone. The two tables share data"
        " files: drop neither with PURGE, and neither expire snapshots nor remove orphan files of"
        " either"
    )


def _find_last_metadata_file(table: Table) -> str:
    """Return the newest readable metadata file in the sink's format version; empty if none is."""
    for entry in reversed(table.metadata.metadata_log):
        try:
            former = FromInputFile.table_metadata(table.io.new_input(entry.metadata_file))
        except Exception:  # noqa: S112
            # Engines delete metadata files, and stores raise the errors of their clients.
            continue
        if former.format_version == FORMAT_VERSION:
            return entry.metadata_file
    return ""
