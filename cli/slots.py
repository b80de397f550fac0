"""The command `onceflow slots`, for the replication slots that Postgres sources have created.

Exit status: 0 done, 1 refused, 2 usage, 3 the server or the storage cannot be reached.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from onceflow.cli.terminal import console, print_listing, read_password, say
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession, endpoint_of
from onceflow.clients.sql.session import DatabaseAccess
from onceflow.core.errors import (
    ConfigError,
    OffsetOutOfRange,
    OnceflowError,
)
from onceflow.core.runtime.dataflow.source_operator import SPLITS, decode_split
from onceflow.core.runtime.events.status_parts import describe_age, describe_bytes
from onceflow.core.secret_references import follow_references
from onceflow.core.spi import Split
from onceflow.core.storage import checkpoint_storage, stored_checkpoints
from onceflow.sources.postgres import left_slots
from onceflow.sources.postgres.slot import connect

EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3

slots = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help=(
        "List the replication slots of onceflow in a Postgres database, and drop those that a"
        " removed job has left behind: the server keeps WAL for each. Exit status: 0 done, 1"
        " refused, 2 usage, 3 the server or the storage cannot be reached."
    ),
)

Url: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Database: postgresql://user@host/db. The password may also be in --password-file or"
        " PGPASSWORD, or be '${env:NAME}' or '${file:/path}' here.",
        envvar="ONCEFLOW_SLOTS_URL",
        show_envvar=True,
    ),
]
PasswordFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="File that contains the password and nothing else.")
]
Storage: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint storage whose jobs are compared with the slots. Default:"
        " ONCEFLOW_STORAGE of the environment, else ONCEFLOW_CHECKPOINTING_STORAGE.",
        envvar=["ONCEFLOW_STORAGE", "ONCEFLOW_CHECKPOINTING_STORAGE"],
        show_envvar=False,
    ),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(help="How long to wait for the server, in seconds.", min=0.1)
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@slots.command("list")
def list_(
    url: Url,
    password_file: PasswordFile = None,
    storage: Storage = None,
    timeout: Timeout = 10.0,
    json_: Json = False,
) -> None:
    """List the slots of onceflow, their jobs, and the WAL that the server keeps for each."""
    with _exit_status(), _connect(url, password_file, timeout) as session:
        listed = left_slots.list_slots(session, _read_owners(storage))
        if json_:
            print(json.dumps({"slots": [_to_json(slot) for slot in listed]}))
            return
        headings = ("SLOT", "JOB", "SOURCE", "IN USE", "UNUSED FOR", "BEHIND", "KEPT WAL", "STATE")
        rows = [[(cell, "") for cell in _to_row(slot)] for slot in listed]
        print_listing(console(), headings, rows)
        if not listed:
            say("The database has no slot of onceflow.")


@slots.command()
def drop(
    names: Annotated[list[str], typer.Argument(help="Names of slots, as `list` shows them.")],
    url: Url,
    password_file: PasswordFile = None,
    storage: Storage = None,
    timeout: Timeout = 10.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Drop slots that a job in --storage needs, too.")
    ] = False,
    json_: Json = False,
) -> None:
    """Drop slots, and the publications that were created with them.

    A slot in use is refused, and one that a job in --storage continues from. A job without its slot
    cannot continue: it has to copy its tables anew.
    """
    with _exit_status(), _connect(url, password_file, timeout) as session:
        chosen = _choose(left_slots.list_slots(session, _read_owners(storage)), names)
        for slot in chosen:
            _check_unused(slot, force)
        listed = ", ".join(slot.facts.name for slot in chosen)
        if not yes and not typer.confirm(f"Drop {listed}? Unread changes are lost", err=True):
            raise typer.Exit(EXIT_REFUSED)
        for slot in chosen:
            left_slots.drop_slot(session, slot)
            if not json_:
                also = f" and publication {slot.publication}" if slot.publication else ""
                print(f"dropped slot {slot.facts.name}{also}")
        if json_:
            dropped = [
                {"slot": slot.facts.name, "publication": slot.publication} for slot in chosen
            ]
            print(json.dumps({"dropped": dropped}))


# --- steps ---------------------------------------------------------------------------------------


@contextmanager
def _exit_status() -> Generator[None, None, None]:
    try:
        yield
    except OnceflowError as error:
        say(f"onceflow slots: {error}", style="red")
        if isinstance(error, OffsetOutOfRange):
            raise typer.Exit(EXIT_REFUSED) from error
        if isinstance(error, ConfigError):
            raise typer.Exit(EXIT_USAGE) from error
        raise typer.Exit(EXIT_UNREACHABLE) from error


@contextmanager
def _connect(url: str, password_file: Path | None, timeout_s: float) -> Generator[PostgresSession]:
    password = read_password(password_file) if password_file else None
    access = DatabaseAccess(
        follow_references(url, setting="--url"),
        password=password,
        connect_timeout_s=timeout_s,
        statement_timeout_s=timeout_s,
    )
    endpoint: PostgresEndpoint = endpoint_of(access, lock_timeout_s=timeout_s)
    with connect(endpoint, "onceflow slots") as session:
        yield session


def _read_owners(storage: str | None) -> dict[str, left_slots.SlotOwner]:
    """Return the source of each slot that a job in `storage` continues from.

    Raises:
        ConfigError: There is no such storage.
        StorageError: The storage cannot be read now.
        CheckpointCorrupt: The log of a job is damaged.
    """
    owners: dict[str, left_slots.SlotOwner] = {}
    if storage is None:
        return owners
    described = checkpoint_storage(storage)
    root = getattr(described, "root", None)
    if root is not None and not Path(root).is_dir():
        raise ConfigError(f"--storage {root}: this machine has no such directory")
    for job in described.open("_").jobs():
        checkpoints = stored_checkpoints.checkpoints_of(described.open(job))
        if checkpoints:
            owners |= left_slots.owners_by_slot(job, list(_list_splits(checkpoints[-1])))
    return owners


def _list_splits(checkpoint: stored_checkpoints.StoredCheckpoint) -> Iterator[tuple[str, Split]]:
    for subtask in checkpoint.completed.snapshots:
        for operator in subtask.operators:
            for encoded in operator.lists.get(SPLITS, ()):
                yield operator.uid, decode_split(encoded).split


def _choose(
    known: Sequence[left_slots.LeftSlot], names: Sequence[str]
) -> Sequence[left_slots.LeftSlot]:
    by_name = {slot.facts.name: slot for slot in known}
    for name in names:
        if name not in by_name:
            there = ", ".join(by_name) or "none"
            raise ConfigError(
                f"the database has no slot of onceflow named {name} (its slots: {there})"
            )
    return [by_name[name] for name in dict.fromkeys(names)]


def _check_unused(slot: left_slots.LeftSlot, force: bool) -> None:
    """Raise OffsetOutOfRange if a reader or a stored job needs the slot."""
    name = slot.facts.name
    if slot.facts.is_active:
        raise OffsetOutOfRange(
            f"slot {name} is in use by {slot.reader or 'a reader'}: stop the job first"
            " (onceflow stop)"
        )
    if slot.is_stored and slot.owner is not None and not force:
        raise OffsetOutOfRange(
            f"job {slot.owner.job} in --storage continues from slot {name}, for its source"
            f" {slot.owner.uid}: without the slot it cannot. If the job is not needed any more,"
            " delete its checkpoints, or give --force"
        )


def _to_row(slot: left_slots.LeftSlot) -> Sequence[str]:
    facts, owner = slot.facts, slot.owner
    unused = "-" if facts.is_active or facts.inactive_s is None else describe_age(facts.inactive_s)
    state = facts.invalidation or facts.wal_status or "-"
    return (
        facts.name,
        owner.job if owner else "-",
        owner.uid if owner else "-",
        "yes" if facts.is_active else "no",
        unused,
        _to_bytes(slot.lag_bytes),
        _to_bytes(facts.retained_bytes),
        state,
    )


def _to_bytes(size: int | None) -> str:
    return "-" if size is None else describe_bytes(size)


def _to_json(slot: left_slots.LeftSlot) -> dict[str, Any]:
    facts, owner = slot.facts, slot.owner
    return {
        "slot": facts.name,
        "job": owner.job if owner else None,
        "source": owner.uid if owner else None,
        "stored": slot.is_stored,
        "active": facts.is_active,
        "reader": slot.reader or None,
        "inactive_s": facts.inactive_s,
        "lag_bytes": slot.lag_bytes,
        "retained_bytes": facts.retained_bytes,
        "wal_status": facts.wal_status or None,
        "invalidation": facts.invalidation or None,
        "publication": slot.publication,
        "warnings": [warning.text for warning in facts.list_warnings()],
    }
