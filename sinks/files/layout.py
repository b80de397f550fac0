"""Every name that the file sink uses below its url. Nobody else puts a path together.

    <partition>/…/part-<sink>-<attempt>-<checkpoint>-<subtask>-<sequence>-<number>.<suffix>
    _onceflow/<sink>/owner.json             which decision log owns the sink id
    _onceflow/<sink>/attempts/<attempt>     one for each attempt, created if absent: the fence
    _onceflow/<sink>/open/<attempt>-<subtask>-<token>-<number>    rows, on their way
    _onceflow/<sink>/staged/<transaction>       manifest: pre-committed, nothing of it published
    _onceflow/<sink>/publishing/<transaction>   manifest: its files are being renamed
    _onceflow/<sink>/aborting/<transaction>     manifest: its files are being deleted
    _onceflow/<sink>/committed/<transaction>    manifest: all its files are published; the proof
    _onceflow/<sink>/pruned/<checkpoint>    proofs of checkpoints before it are deleted

`<sink>` is the sink id, or a digest of it where it is no safe file name; `<transaction>` is
`<attempt>-<checkpoint>-<subtask>-<sequence>`. Readers that take a directory for a table pass over
names that begin with "_" or "."; those that take a pattern (`**/*.parquet`) find no such suffix in
`_onceflow`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.storage.layout import safe_name

HIDDEN = "_onceflow"

_TRANSACTION = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)")
_OPEN = re.compile(r"(\d+)-\d+-[0-9a-f]+-\d+")
_PART = re.compile(r"part-(.+)-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)\.[a-z0-9.]+")


@dataclass(frozen=True, slots=True)
class SinkPaths:
    """The names of one sink id."""

    sink_id: str

    @property
    def directory(self) -> str:
        """Where everything of the sink id is that readers do not see."""
        return f"{HIDDEN}/{safe_name(self.sink_id)}"

    @property
    def owner(self) -> str:
        """The file that names the decision log."""
        return f"{self.directory}/owner.json"

    @property
    def attempts(self) -> str:
        """The directory of the attempts that have claimed the sink id."""
        return f"{self.directory}/attempts"

    def attempt(self, attempt: AttemptId) -> str:
        """The file that claims `attempt`."""
        return f"{self.attempts}/{attempt:08}"

    @property
    def open(self) -> str:
        """The directory of rows that are written."""
        return f"{self.directory}/open"

    def data(self, attempt: AttemptId, subtask: int, token: str, number: int) -> str:
        """The file that one writer writes as its `number`th; `token` is the writer's own."""
        return f"{self.open}/{attempt}-{subtask}-{token}-{number}"

    @staticmethod
    def attempt_of(name: str) -> int | None:
        """Return the attempt that wrote the data file `name`; None: it is not ours."""
        match = _OPEN.fullmatch(name)
        return int(match[1]) if match else None

    @property
    def staged(self) -> str:
        """The directory of manifests of which nothing is published."""
        return f"{self.directory}/staged"

    @property
    def publishing(self) -> str:
        """The directory of manifests whose files may be published."""
        return f"{self.directory}/publishing"

    @property
    def aborting(self) -> str:
        """The directory of manifests whose files may be deleted."""
        return f"{self.directory}/aborting"

    @property
    def committed(self) -> str:
        """The directory of proofs."""
        return f"{self.directory}/committed"

    @property
    def pruned(self) -> str:
        """The directory of marks up to which proofs were deleted."""
        return f"{self.directory}/pruned"

    def pruned_mark(self, before: CheckpointId) -> str:
        """The mark that proofs of checkpoints before `before` may be gone."""
        return f"{self.pruned}/{before:010}"

    def transactions(self, names: Iterable[str]) -> list[TransactionId]:
        """Return the transactions that manifests called `names` are of, oldest first."""
        matches = map(_TRANSACTION.fullmatch, names)
        found = [TransactionId(self.sink_id, *map(int, m.groups())) for m in matches if m]
        return sorted(found, key=lambda t: (t.checkpoint, t.attempt, t.subtask, t.sequence))

    def part(self, transaction: TransactionId, number: int, suffix: str) -> str:
        """Return the public name of a transaction's `number`th file, without its directory."""
        return f"part-{safe_name(self.sink_id)}-{name_of(transaction)}-{number:05}.{suffix}"

    def transaction_of_part(self, name: str) -> TransactionId | None:
        """Return the transaction that published the file called `name`; None: another's."""
        match = _PART.fullmatch(name)
        if match is None or match[1] != safe_name(self.sink_id):
            return None
        return TransactionId(self.sink_id, *map(int, match.groups()[1:5]))


def name_of(transaction: TransactionId) -> str:
    """Return the name of a transaction's manifest."""
    t = transaction
    return f"{t.attempt}-{t.checkpoint}-{t.subtask}-{t.sequence}"
