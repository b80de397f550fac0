"""The names of all files of the file sink below its url. No other module builds these paths.

    <partition>/…/part-<sink>-<attempt>-<checkpoint>-<subtask>-<sequence>-<number>-<token>.<suffix>

    _onceflow/<sink>/owner.json             which decision log owns the sink id
    _onceflow/<sink>/attempts/<attempt>     one for each attempt, created if absent: the fence; says
                                            what was committed when it and those before claimed
    _onceflow/<sink>/open/<attempt>-<subtask>-<token>-<number>    rows, being written
    _onceflow/<sink>/staged/<transaction>       manifest: pre-committed, nothing of it published
    _onceflow/<sink>/publishing/<transaction>   manifest: its files are being renamed
    _onceflow/<sink>/aborting/<transaction>     manifest: its files are being deleted
    _onceflow/<sink>/committed/<transaction>    manifest: all its files are published; the proof
    _onceflow/<sink>/pruned/<checkpoint>    proofs of checkpoints before it are deleted

`<sink>` is the sink id, or a digest of it if the sink id is no safe file name. `<transaction>` is
`<attempt>-<checkpoint>-<subtask>-<sequence>`. `<token>` is unique for each writer. A new decision
log restarts the numbers, so without a token its files would replace published files of an older
log. Readers that read a directory as a table skip names that begin with "_" or ".". Readers that
use a pattern (`**/*.parquet`) find no such suffix in `_onceflow`.

One decision log may write under a sink id, in its newest attempt (`claim`). The owner's file names
the log that claimed first; the highest attempt that has a file is the newest.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError, Fenced
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import ATTEMPTS_MAX
from onceflow.core.protocol.log.rules import NO_ATTEMPT
from onceflow.core.spi import CommitterContext
from onceflow.core.storage.filesystems.filesystem import Created, FileSystem
from onceflow.core.storage.layout import safe_name
from onceflow.sinks.base.checks import FenceOwner, check_owner

HIDDEN = "_onceflow"

_TRANSACTION = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)")
_OPEN = re.compile(r"(\d+)-\d+-[0-9a-f]+-\d+")
_PART_OF_SINK = r"-(\d+)-(\d+)-(\d+)-(\d+)-\d{5,}(?:-[0-9a-f]{12})?\.[a-z0-9.]+"
"""The end of a public name. Some data of version 0.1.0 has no token."""


@dataclass(frozen=True, slots=True)
class SinkPaths:
    """The names of the files of one sink id."""

    sink_id: str

    @property
    def directory(self) -> str:
        """The directory of all files of the sink id that readers do not see."""
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
        """Return the path of the file that claims `attempt`."""
        return f"{self.attempts}/{attempt:08}"

    @property
    def open(self) -> str:
        """The directory of files that are being written."""
        return f"{self.directory}/open"

    def data(self, attempt: AttemptId, subtask: int, token: str, number: int) -> str:
        """Return the path of file `number` of a writer.

        `token` is from `draw_writer_token`.
        """
        return f"{self.open}/{attempt}-{subtask}-{token}-{number}"

    @staticmethod
    def attempt_of(name: str) -> int | None:
        """Return the attempt that wrote the data file `name`, or None if it is no data file."""
        match = _OPEN.fullmatch(name)
        return int(match[1]) if match else None

    @property
    def staged(self) -> str:
        """The directory of manifests with no published files."""
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
        """The directory of marks that say which proofs were deleted."""
        return f"{self.directory}/pruned"

    def name_pruned_mark(self, before: CheckpointId) -> str:
        """Return the path of the mark that proofs of checkpoints below `before` are deleted."""
        return f"{self.pruned}/{before:010}"

    def transactions(self, names: Iterable[str]) -> list[TransactionId]:
        """Return the transactions of the manifests called `names`, oldest first."""
        matches = map(_TRANSACTION.fullmatch, names)
        transactions = [TransactionId(self.sink_id, *map(int, m.groups())) for m in matches if m]
        return sorted(transactions, key=lambda t: (t.checkpoint, t.attempt, t.subtask, t.sequence))

    def part(self, transaction: TransactionId, number: int, token: str, suffix: str) -> str:
        """Return the public name of a transaction's file `number`, without its directory."""
        sink = safe_name(self.sink_id)
        return f"part-{sink}-{name_of(transaction)}-{number:05}-{token}.{suffix}"

    def transaction_of_part(self, name: str) -> TransactionId | None:
        """Return the transaction that published the file called `name`, or None for other files."""
        match = re.fullmatch(f"part-{re.escape(safe_name(self.sink_id))}{_PART_OF_SINK}", name)
        return TransactionId(self.sink_id, *map(int, match.groups())) if match else None


def draw_writer_token() -> str:
    """Return a random token that makes the names of a writer's files unique."""
    return uuid.uuid4().hex[:12]


def name_of(transaction: TransactionId) -> str:
    """Return the name of a transaction's manifest."""
    t = transaction
    return f"{t.attempt}-{t.checkpoint}-{t.subtask}-{t.sequence}"


_ATTEMPTS_KEPT = 8
"""The number of attempts whose claims are kept in the directory."""


def create_file(fs: FileSystem, path: str, data: bytes) -> bool:
    """Create `path` with `data` unless it exists; return True if this caller created it.

    `data` differs from any other caller's, so a call whose reply was lost may be repeated.
    """
    outcome = fs.create_if_absent(path, data)
    return isinstance(outcome, Created) or outcome.existing == data


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the owner's file."""

    log_id: str
    job: str
    sink_id: str
    token: str
    """A random token per claim, so that no two files have the same bytes."""


class FileClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The content of an attempt's file."""

    token: str
    """A random token per claim, so that no two files have the same bytes."""
    through: tuple[tuple[int, int], ...] = ()
    """The last whole checkpoint committed when each attempt claimed, in rising order, this one
    last."""


def claim(
    fs: FileSystem,
    paths: SinkPaths,
    context: CommitterContext,
    through: CheckpointId = GENESIS,
) -> None:
    """Claim the sink id for the attempt of `context`; from then on no older attempt may write.

    `through` is the last whole checkpoint that the target has committed. It is 0 if there is none,
    or if the target commits each transaction by itself.

    Raises:
        ConfigError: Another job owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
    """
    owner = Owner(
        log_id=context.log_id, job=context.job, sink_id=context.sink_id, token=uuid.uuid4().hex
    )
    if not create_file(fs, paths.owner, msgspec.json.encode(owner)):
        _require_owner(fs, paths, context)
    _require_newest(fs, paths, context)
    mine = paths.attempt(context.attempt)
    known = (*claims_through(fs, paths), (context.attempt, through))[-ATTEMPTS_MAX:]
    content = msgspec.json.encode(FileClaim(token=uuid.uuid4().hex, through=known))
    if not create_file(fs, mine, content):
        raise _make_fenced(context, context.attempt)
    # A newer attempt may have claimed between the two steps.
    _require_newest(fs, paths, context, besides=context.attempt)
    for name in fs.list(paths.attempts)[:-_ATTEMPTS_KEPT]:
        fs.delete(f"{paths.attempts}/{name}")


def owners(fs: FileSystem) -> dict[str, str]:
    """Return the owning decision log of each sink id that has written here."""
    owners: dict[str, str] = {}
    for directory in fs.list(HIDDEN):
        data = fs.read(f"{HIDDEN}/{directory}/owner.json")
        if data:
            owner = json_decoder(Owner).decode(data)
            owners[owner.sink_id] = owner.log_id
    return owners


def read_claim(fs: FileSystem, paths: SinkPaths, context: CommitterContext) -> AttemptId:
    """Return the newest attempt that has claimed the sink id; 0 if there is none.

    Raises:
        ConfigError: Another job owns the sink id.
    """
    if fs.read(paths.owner) is None:
        return NO_ATTEMPT
    _require_owner(fs, paths, context)
    claimed = [int(name) for name in fs.list(paths.attempts) if name.isdigit()]
    return AttemptId(max(claimed, default=NO_ATTEMPT))


def claims_through(fs: FileSystem, paths: SinkPaths) -> tuple[tuple[int, int], ...]:
    """Return (attempt, last whole checkpoint committed when it claimed), by rising attempt."""
    newest = max((name for name in fs.list(paths.attempts) if name.isdigit()), default=None)
    content = fs.read(f"{paths.attempts}/{newest}") if newest else None
    return json_decoder(FileClaim).decode(content).through if content else ()


def _require_owner(fs: FileSystem, paths: SinkPaths, context: CommitterContext) -> None:
    location = fs.location(paths.owner)
    try:
        owner = json_decoder(Owner).decode(fs.read(paths.owner) or b"")
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{location} cannot be read for the owner of the sink id: {error}"
        ) from error
    newest = max((int(name) for name in fs.list(paths.attempts) if name.isdigit()), default=0)
    check_owner(
        context.sink_id,
        FenceOwner(owner.log_id, newest, owner.job),
        FenceOwner(context.log_id, context.attempt, context.job),
        take_over=f"deleting {fs.location(paths.directory)}",
    )


def _require_newest(
    fs: FileSystem, paths: SinkPaths, context: CommitterContext, *, besides: int | None = None
) -> None:
    claimed = [int(name) for name in fs.list(paths.attempts) if name.isdigit()]
    newest = max((attempt for attempt in claimed if attempt != besides), default=0)
    if newest >= context.attempt:
        raise _make_fenced(context, newest)


def _make_fenced(context: CommitterContext, newest: int) -> Fenced:
    return Fenced(
        f"attempt {context.attempt} may not write under sink id {context.sink_id!r}: attempt"
        f" {newest} of the same job has claimed it; this attempt is out of date and stops"
    )
