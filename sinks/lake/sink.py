"""The common options of sinks of lake tables, among them when versions are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import CommitInterval
from onceflow.core.setting_values import seconds_of
from onceflow.core.spi import CommittedBy, CommitterContext, GlobalCommitter, Sink
from onceflow.core.spi.options import BOOLEAN, COUNT, DURATION, NAMES, choice, option
from onceflow.sinks.lake.committer import LakeChangeCommitter, LakeCommitter, claim_table
from onceflow.sinks.lake.data_files import try_to_remove_orphans
from onceflow.sinks.lake.table import LakeTable
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode

_ORPHAN_AGE_MIN_S = 3600


@dataclass(frozen=True, kw_only=True, repr=False)
class LakeSink(Sink):
    """A sink whose driver makes table versions, each of one or several whole checkpoints."""

    instead_of_replacing: ClassVar[str] = "Append to a new table, and let readers go there"

    commit_interval: float | str | None = field(
        default=None,
        metadata=option(
            "How long decided checkpoints wait, at most, to become visible together: seconds, or"
            " `5 min`. Without it, and without `commit_checkpoints`, each is visible at once",
            DURATION,
        ),
    )
    commit_checkpoints: int | None = field(
        default=None,
        metadata=option(
            "How many decided checkpoints become visible together, at most 1000. With"
            " `commit_interval`, whichever comes first",
            COUNT,
        ),
    )

    remove_orphans_after: float | str | None = field(
        default=None,
        metadata=option(
            "At each start, delete data files of earlier attempts of this job that nothing names"
            " and that are older than this: `3 d`, or seconds, at least an hour. Without it they"
            " are left",
            DURATION,
        ),
    )

    write_mode: Literal["append", "upsert"] = field(
        default="append",
        metadata=option(
            "`append` adds rows. `upsert` replaces the row of the same key, or adds one. It needs"
            " primary_key, sends the rows of a key to one subtask, and has the driver rewrite the"
            " data files that have such rows",
            choice("append", "upsert"),
        ),
    )
    primary_key: tuple[str, ...] = field(
        default=(),
        metadata=option("Columns that identify a row, never null, of `upsert`", NAMES),
    )
    tombstones: bool = field(
        default=False,
        metadata=option(
            "Whether a row that is null in all columns outside the key deletes the row of its key",
            BOOLEAN,
        ),
    )
    operation_column: str | None = field(
        default=None,
        metadata=option(
            "Text column with the operation of each row. `insert`, `create`, `c`, `r`, `i`,"
            " `upsert`, `update`, `u`: put the row. `delete`, `d`: delete the row of its key. The"
            " column is not written"
        ),
    )

    def __post_init__(self) -> None:
        if self.write_mode not in ("append", "upsert"):
            raise ConfigError(f"write_mode={self.write_mode!r}: give 'append' or 'upsert'")
        if self.primary_key and not self.upserts:
            raise ConfigError(
                f"primary_key={self.primary_key} finds rows to replace, which write_mode='append'"
                " never does; pass write_mode='upsert', or no key"
            )
        object.__setattr__(self, "primary_key", tuple(self.primary_key))
        _ = self.gathering, self._orphan_age_s, self.rules  # raise where a setting is wrong

    @property
    def upserts(self) -> bool:
        """True if rows replace others by key."""
        return self.write_mode == "upsert"

    @property
    def rules(self) -> ChangeRules:
        """The rules by which rows become changes; those of inserts if rows are appended."""
        if not self.upserts and (self.tombstones or self.operation_column):
            setting = "tombstones" if self.tombstones else "operation_column"
            raise ConfigError(
                f"{setting} deletes rows by their key, which write_mode='append' never looks at;"
                " pass write_mode='upsert' with primary_key=(…)"
            )
        mode = WriteMode.UPSERT if self.upserts else WriteMode.INSERT
        return ChangeRules(mode, self.primary_key, self.tombstones, self.operation_column)

    @override
    def routing_key(self) -> tuple[str, ...]:
        """Return the primary key, so that all changes of a key go to one subtask."""
        return self.primary_key

    def make_committer(self, table: LakeTable, context: CommitterContext) -> GlobalCommitter:
        """Return the committer of the write mode."""
        kind = LakeChangeCommitter if self.upserts else LakeCommitter
        return kind(table, context)

    @property
    @override
    def committed_by(self) -> CommittedBy:
        """The driver, which makes versions of whole checkpoints."""
        return CommittedBy.DRIVER

    @property
    @override
    def gathering(self) -> CommitInterval | None:
        """The interval of the two commit settings, or None if neither is set."""
        given = self.commit_interval
        seconds = None if given is None else seconds_of(given, setting="commit_interval")
        if seconds is None and self.commit_checkpoints is None:
            return None
        return CommitInterval(self.commit_checkpoints, seconds)

    def claim(self, table: LakeTable, context: CommitterContext) -> None:
        """Claim the sink id, and remove orphan files if the user configured that.

        Raises:
            ConfigError: Another decision log owns the sink id.
            Fenced: This attempt or a newer one has claimed it.
            PreparedTransactionLost: The table has lost the last commit of the sink id.
            SinkError: The table does not answer, or other commits came first too often.
        """
        claim_table(table, context)
        if self._orphan_age_s is not None:
            try_to_remove_orphans(table, context, self._orphan_age_s)

    @property
    def _orphan_age_s(self) -> float | None:
        given = self.remove_orphans_after
        if given is None:
            return None
        age_s = seconds_of(given, setting="remove_orphans_after")
        if age_s < _ORPHAN_AGE_MIN_S:
            raise ConfigError(
                f"remove_orphans_after={given!r}: give at least {_ORPHAN_AGE_MIN_S} seconds, for a"
                " slot of an earlier attempt may still write its files"
            )
        return age_s
