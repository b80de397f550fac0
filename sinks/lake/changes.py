"""The changes of rows by key, as writers stage them and as versions apply them.

    part    JSON: the id of the table, and the columns of its key
    rows    the table's columns, then `onceflow_deletes`: whether the key of the row is deleted

A put replaces the whole row of its key. For a delete only the key has a meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import TargetRefused
from onceflow.core.msgspec_decoders import json_decoder

DELETES = "onceflow_deletes"
"""The name of the last column of staged rows."""
_NUMBER = "onceflow_number"


class ChangesLabel(msgspec.Struct, frozen=True):
    """The label that is staged with each batch of changes."""

    table_id: str
    """The id of the table for which the changes were written."""
    key: tuple[str, ...]

    def to_part(self) -> str:
        """Return the text that is staged."""
        return msgspec.json.encode(self).decode()


def parse_label(part: str) -> ChangesLabel:
    """Return the label that `to_part` encoded.

    Raises:
        TargetRefused: The text is another one: the rows were staged in another write mode.
    """
    try:
        return json_decoder(ChangesLabel).decode(part)
    except msgspec.DecodeError:
        raise TargetRefused(
            "rows wait for their commit that were written with write_mode='append'; start the job"
            " once with that setting, stop it, and change the setting then"
        ) from None


@dataclass(frozen=True, slots=True)
class RowChanges:
    """The changes of one version, at most one for each key."""

    rows: pa.Table
    """The table's columns, and `DELETES`."""
    key: tuple[str, ...]

    @property
    def puts(self) -> pa.Table:
        """The rows to write: they replace the rows of their keys, or are new."""
        kept = self.rows.filter(pc.invert(self.rows[DELETES]))
        return kept.drop_columns([DELETES])


def merge_changes(staged: Iterable[pa.RecordBatch], key: Sequence[str]) -> RowChanges:
    """Return the last change of each key in `staged`, which is in the order of the changes.

    Holds all of them in memory. Columns that a batch lacks and others have are null.
    """
    tables = [pa.Table.from_batches([batch]) for batch in staged]
    rows = pa.concat_tables(tables, promote_options="permissive")
    numbered = rows.select(key).append_column(_NUMBER, pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(list(key)).aggregate([(_NUMBER, "max")])
    return RowChanges(rows.take(last[f"{_NUMBER}_max"]), tuple(key))
